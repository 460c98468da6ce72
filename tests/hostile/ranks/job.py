"""Jobs of real processes, forked from one that has imported torch and has no threads, and reused for many loops.

A job whose ranks were killed or do not answer is ended, and the next job of that size is forked again.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from hostile.ranks.draw import Life, Setup
from hostile.ranks.moves import Ending

HANGS_S = 120.0  # the longest time for one life of a job


@dataclass(slots=True, eq=False)
class Rank:
    pid: int
    line: Connection
    said: IO[str]
    status: int | None = None

    def words(self) -> str:
        self.said.seek(0)
        return self.said.read()[-5000:]


@dataclass(slots=True)
class Told:
    """The reports of one life's ranks, by rank; `ended`: how the ranks ended that no longer exist."""

    tries: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    loads: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    rewound: list[int] = field(default_factory=list)
    escaped: set[tuple[str, str]] = field(default_factory=set)  # (position of the saves, move)
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Keeper:
    """The process with the job's key-value store; like a launcher's agent, it outlives all ranks."""

    def __init__(self) -> None:
        here, there = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            here.close()
            _keep(there)
        there.close()
        self.line, self.port = here, int(here.recv())
        self.jobs = 0

    def end(self) -> None:
        self.line.close()
        os.waitpid(self.pid, 0)


def _keep(line: Connection) -> None:
    from torch.distributed import TCPStore

    try:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        line.send(store.port)
        line.recv()
    except EOFError:
        pass
    finally:
        os._exit(0)


class Job:
    """`size` ranks of one group."""

    def __init__(self, agent: Keeper, size: int, mutation: str = "") -> None:
        self.size = size
        agent.jobs += 1
        self.ranks: list[Rank] = []
        for rank in range(size):
            here, there = Pipe()
            file = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # for as long as the rank lives
            pid = os.fork()
            if pid == 0:
                for other in self.ranks:
                    other.line.close()
                here.close()
                agent.line.close()
                _be(there, file, (agent.port, f"job{agent.jobs}"), (rank, size), mutation)
            there.close()
            self.ranks.append(Rank(pid, here, file))

    def play(self, setup: Setup, life: Life, number: int, root: Path, hangs_s: float = HANGS_S) -> Told:
        """One life. A rank that does not reach its end, or dies without being killed by the test, is a problem."""
        events = Told({rank: [] for rank in range(self.size)}, {rank: [] for rank in range(self.size)})
        for rank in self.ranks:
            rank.line.send((setup, life, number, root))
        lines = {rank.line: index for index, rank in enumerate(self.ranks)}
        deadline = time.monotonic() + hangs_s
        while lines and (left_s := deadline - time.monotonic()) > 0:
            for line in wait(list(lines), left_s):
                position = lines[line]  # type: ignore[index]
                try:
                    verb, words = line.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    del lines[line]  # type: ignore[arg-type]
                    self._ended(position, life, events)
                    deadline = min(deadline, time.monotonic() + hangs_s / 2)
                    continue
                _note(events, position, verb, words)
                if verb == "report":
                    del lines[line]  # type: ignore[arg-type]
        if lines:
            self._hung(sorted(lines.values()), events)
        return events

    def _ended(self, position: int, life: Life, events: Told) -> None:
        rank = self.ranks[position]
        _, status = os.waitpid(rank.pid, 0)
        rank.status = code = os.waitstatus_to_exitcode(status)
        if code in (-signal.SIGKILL, -signal.SIGALRM) and life.ending is Ending.KILLED:
            return
        how = f"of {signal.Signals(-code).name}" if code < 0 else f"with {code}"
        events.problems.append(f"it died {how}: rank {position}\n{rank.words()}")

    def _hung(self, late: list[int], events: Told) -> None:
        alive = [rank for rank in self.ranks if rank.status is None]
        for rank in alive:
            os.kill(rank.pid, signal.SIGUSR1)  # prints the stack of every thread
        time.sleep(0.5)
        words = "\n".join(f"--- rank {index}\n{self.ranks[index].words()}" for index in late)
        events.problems.append(f"it hung: ranks {late}\n{words}")

    def end(self) -> None:
        for rank in self.ranks:
            rank.line.close()
            if rank.status is None:
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
            rank.said.close()


def _note(events: Told, i: int, verb: str, words: dict[str, Any]) -> None:
    if verb == "try":
        events.tries[i].append(words)
    elif verb == "load":
        events.loads[i].append(words)
    elif verb == "rewound":
        events.rewound.append(words["step"])
        events.loads[i] = [load for load in events.loads[i] if load["step"] <= words["step"]]  # others are saved anew
    elif verb == "escaped":
        events.escaped.add((words["position"], words["name"]))
    else:
        events.reports[i] = words
        events.problems.extend(words["problems"])


def _be(
    line: Connection, stream: IO[str], board: tuple[int, str], place: tuple[int, int], mutation: str
) -> None:
    """This process is a rank from here on, and does not return."""
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        _serve(line, board, place, mutation)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # skips the end of gloo's threads, which aborts one process in eight


def _serve(line: Connection, board: tuple[int, str], place: tuple[int, int], mutation: str) -> None:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from hostile.mutations import MUTATIONS
    from hostile.ranks.loop import hasty, play
    from hostile.ranks.states import mesh_of, two_dimensions

    os.environ |= {"RANK": str(place[0]), "WORLD_SIZE": str(place[1])}
    store = PrefixStore(board[1], dist.TCPStore("127.0.0.1", board[0], None, False))
    dist.init_process_group(
        "gloo", store=store, rank=place[0], world_size=place[1], timeout=timedelta(seconds=HANGS_S)
    )
    for shape in ((place[1],), two_dimensions(place[1])):
        if shape:
            mesh_of(*shape)
    tell: Callable[[str, dict[str, Any]], None] = lambda verb, words: line.send((verb, words))  # noqa: E731
    with hasty(), MUTATIONS[mutation]():
        while True:
            try:
                setup, life, number, root = line.recv()
            except EOFError:
                return
            tell("report", play(setup, life, number, root, tell))


class Jobs:
    """Jobs of every size that is requested, reused as long as they work."""

    def __init__(self, mutation: str = "") -> None:
        self._keeper, self._mutation = Keeper(), mutation
        self._jobs: dict[int, Job] = {}

    def of(self, size: int) -> Job:
        if size not in self._jobs:
            self._jobs[size] = Job(self._keeper, size, self._mutation)
        return self._jobs[size]

    def drop(self, size: int) -> None:
        """Its ranks were killed, or may be in a bad state."""
        self._jobs.pop(size).end()

    def end(self) -> None:
        for size in list(self._jobs):
            self.drop(size)
        self._keeper.end()
