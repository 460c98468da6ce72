"""Act four: a training job is saved by several ranks, and killed; it is loaded by fewer ranks, killed again, and loaded
by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from flowstone_demo.kill_loop import newest_step
from flowstone_demo.messages import RankOrder
from flowstone_demo.rank_processes import RankKill, RankRun, run_ranks
from flowstone_demo.sizes import RankDemoSize


def kills(form: RankDemoSize) -> tuple[RankKill, RankKill, None]:
    """For each number of ranks, the kill that ends the training; None: it runs to its end."""
    return (
        RankKill(form.killed_saving, (form.victim,), saving=True),
        RankKill(form.killed_at, tuple(range(form.ranks[1])), saving=False),
        None,
    )


def runs_here() -> bool:
    """Whether FSDP2 works on CPUs. In torch 2.6 it does not: it records events on streams, which CPUs do not support.
    """
    import torch

    return hasattr(torch.cpu.Stream, "record_event")


def rank_runs(order: RankOrder, work: Path, show: Callable[[str], None]) -> Iterator[RankRun]:
    """Run the training on fewer and fewer ranks. Each run continues from the newest committed step. Raises DiedError.

    Before each of these runs, the same ranks run the complete training without saves and kills, for comparison.
    """
    for ranks, kill in zip(order.form.ranks, kills(order.form), strict=True):
        run = RankRun(ranks, newest_step(Path(order.store)))
        yield run_ranks(order, work / f"across-{ranks}.log", run, kill, show)


def told(run: RankRun, form: RankDemoSize) -> str:
    """A line of text that says what happened in one run of the killed training."""
    resumed = run.resumed.get(0)
    start = f"{run.ranks} rank{'s' * (run.ranks > 1)}, {'fresh' if resumed is None else f'from step {resumed}'}"
    if not run.killed:
        return f"{start}: finished at step {max(run.losses[0])}"
    if len(run.killed) == run.ranks:
        return f"{start}: all killed after step {form.killed_at}"
    words = "; ".join(sorted(set(run.lost.values())))
    return f"{start}: rank {run.killed[0]} killed as it began to save step {form.killed_saving}; the others: {words}"
