"""The supervisor's handle of the ranks of one job: start them, read their messages, kill one or all."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from flowstone_demo.child_process import ChildProcess, DiedError
from flowstone_demo.messages import (
    LOST,
    Began,
    Finished,
    Held,
    Lost,
    Message,
    RankOrder,
    SaveCommitted,
    Saving,
    Stepped,
    Undisturbed,
)

LISTEN_S = 0.25


@dataclass(frozen=True, slots=True)
class RankKill:
    """SIGKILL for `victims`, when the first of them reports that it begins to save `step`, or has done that step."""

    step: int
    victims: tuple[int, ...]
    saving: bool

    def falls(self, rank: int, message: Message) -> bool:
        awaited = Saving if self.saving else Stepped
        return rank == self.victims[0] and isinstance(message, awaited) and message.step == self.step


@dataclass(slots=True)
class RankRun:
    """The messages of one job's ranks, from start to end. Lists are by rank.

    newest     the newest committed step on disk just before; None for none
    found      the step from which each says that it continues
    calm       losses by step, of the undisturbed training
    losses     losses by step, of the training that may be killed
    saved      by step: digest of each tensor in memory, just before it was saved
    loaded     by step: digest of each tensor in memory, just after a load
    committed  steps reported as committed
    killed     ranks that were killed
    lost       the error that each of the others then got
    """

    ranks: int
    newest: int | None = None
    began: list[Began] = field(default_factory=list)
    found: dict[int, int | None] = field(default_factory=dict)
    calm: list[dict[int, float]] = field(default_factory=list)
    losses: list[dict[int, float]] = field(default_factory=list)
    saved: dict[int, list[dict[str, Held]]] = field(default_factory=dict)
    loaded: list[dict[str, Held]] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)
    killed: tuple[int, ...] = ()
    lost: dict[int, str] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.calm = [{} for _ in range(self.ranks)]
        self.losses = [{} for _ in range(self.ranks)]
        self.loaded = [{} for _ in range(self.ranks)]

    def enter(self, rank: int, message: Message) -> None:
        match message:
            case Began():
                self.began.append(message)
                self.found[rank] = message.resumed_step
            case Stepped(step, loss):
                self.losses[rank][step] = loss
            case Undisturbed(step, loss):
                self.calm[rank][step] = loss
            case Held(step, loaded, name):
                saved = self.saved.setdefault(step, [{} for _ in range(self.ranks)]) if not loaded else self.loaded
                saved[rank][name] = message
            case SaveCommitted(step):
                self.committed.add(step)
            case Lost(words):
                self.lost[rank] = words
            case Finished():
                self.finished.add(rank)

    def line(self, steps: int) -> str:
        """The progress of the training, for a person."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        curve = self.losses[0] or self.calm[0]
        if not curve:
            return f"{ranks}: starting"
        step = max(curve)
        return f"{ranks}{'' if self.losses[0] else ', undisturbed'}: step {step:3d} of {steps}   loss {curve[step]:.3f}"


def run_ranks(order: RankOrder, log: Path, run: RankRun, kill: RankKill | None, show: Callable[[str], None]) -> RankRun:
    """Start `run.ranks` processes that run `order`, and read their messages until they end, or `kill` is due.

    log     of rank 0; the others' have the rank appended
    show    called now and then with the progress
    raises  DiedError if a process does not end as planned
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in the stubs; only this needs torch

    # As under torchrun: no rank hosts the rendezvous store, so that it outlives each of them.
    # Without libuv, which some builds of torch lack (Debian's).
    meeting = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=False)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                ChildProcess(order, log.with_suffix(f".{rank}.log"), _place(rank, run.ranks, meeting.port))
            )
            for rank in range(run.ranks)
        ]
        while not all(process.over for process in processes):
            for rank, message in _hear(processes):
                run.enter(rank, message)
                if kill is not None and not run.killed and kill.falls(rank, message):
                    _kill(kill, processes, run)
            show(run.line(order.form.steps))
        for rank, process in enumerate(processes):
            if rank not in run.killed:
                process.end(LOST if run.killed else 0)
    if kill is not None and not run.killed:
        raise DiedError(f"{run.ranks} ranks ended before step {kill.step}, where some were to be killed")
    return run


def _kill(kill: RankKill, processes: list[ChildProcess], run: RankRun) -> None:
    run.killed = kill.victims
    for victim in kill.victims:
        for message in processes[victim].kill():
            run.enter(victim, message)


def _hear(processes: list[ChildProcess]) -> list[tuple[int, Message]]:
    """Messages that have arrived from any rank; waits a while for the first."""
    select.select([process for process in processes if not process.over], [], [], LISTEN_S)
    return [(rank, message) for rank, process in enumerate(processes) for message in process.hear(0.0)]


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
