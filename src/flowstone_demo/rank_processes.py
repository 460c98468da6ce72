"""The ranks of one job, for the supervisor: starts them, reads their messages, and kills one or all."""

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
    """SIGKILL for the ranks `victims`. It is sent once the first of them reports that it begins to save `step` (if
    `saving`), or has done that step.
    """

    step: int
    victims: tuple[int, ...]
    saving: bool

    def falls(self, rank: int, message: Message) -> bool:
        awaited = Saving if self.saving else Stepped
        return rank == self.victims[0] and isinstance(message, awaited) and message.step == self.step


@dataclass(slots=True)
class RankRun:
    """What the ranks of one job have reported, from start to end. Lists have an entry for each rank.

    newest     the newest committed step on disk just before the start; None: none
    resumed    for each rank, the step from which it reports that it continues
    calm       the losses of the training without saves and kills: step -> loss
    losses     the losses of the training that may be killed: step -> loss
    saved      for each step, the digests of all tensors in memory just before the save
    loaded     the digests of all tensors in memory just after the load
    committed  the steps that were reported as committed
    killed     ranks that were killed
    lost       for each other rank, the error that it got then
    """

    ranks: int
    newest: int | None = None
    began: list[Began] = field(default_factory=list)
    resumed: dict[int, int | None] = field(default_factory=dict)
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
                self.resumed[rank] = message.resumed_step
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
        """The progress of the training, as a line of text."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        curve = self.losses[0] or self.calm[0]
        if not curve:
            return f"{ranks}: starting"
        step = max(curve)
        return f"{ranks}{'' if self.losses[0] else ', undisturbed'}: step {step:3d} of {steps}   loss {curve[step]:.3f}"


def run_ranks(order: RankOrder, log: Path, run: RankRun, kill: RankKill | None, show: Callable[[str], None]) -> RankRun:
    """Start `run.ranks` processes that do what `order` says, and read their messages until they end, or until `kill` is
    due.

    log     the log file of rank 0; names of the other ranks' log files end with the rank
    show    called repeatedly with the progress
    raises  DiedError  a process did not end as planned
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in the stubs; only this needs torch

    # As under torchrun, no rank hosts the rendezvous store, so that it exists longer than each rank. It is used without
    # libuv, which some builds of torch (Debian's) lack.
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
        raise DiedError(f"{run.ranks} ranks ended before step {kill.step}, the step of the planned kill")
    return run


def _kill(kill: RankKill, processes: list[ChildProcess], run: RankRun) -> None:
    run.killed = kill.victims
    for victim in kill.victims:
        for message in processes[victim].kill():
            run.enter(victim, message)


def _hear(processes: list[ChildProcess]) -> list[tuple[int, Message]]:
    """The messages that have arrived from any rank, with the rank. Waits a short time for the first one."""
    select.select([process for process in processes if not process.over], [], [], LISTEN_S)
    return [(rank, message) for rank, process in enumerate(processes) for message in process.receive(0.0)]


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
