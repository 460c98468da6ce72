"""Jobs of real processes: forked from one that has imported torch and has no threads, and used for many loops.

A job whose ranks have been killed, or do not come back, is ended; the next of that size is forked anew.
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

HANGS_S = 120.0  # for a life of a job to come to its end


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
    """What one life's ranks have told, by rank; `ended`: how those ended that are no more."""

    tries: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    loads: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    rewound: list[int] = field(default_factory=list)
    escaped: set[tuple[str, str]] = field(default_factory=set)  # from saves of a position, by what: ranks may die since
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Keeper:
    """The process that keeps the jobs' store, as an agent does: it outlives all ranks."""

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

    def __init__(self, keeper: Keeper, size: int, mutation: str = "") -> None:
        self.size = size
        keeper.jobs += 1
        self.ranks: list[Rank] = []
        for rank in range(size):
            here, there = Pipe()
            said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # for as long as the rank lives
            pid = os.fork()
            if pid == 0:
                for other in self.ranks:
                    other.line.close()
                here.close()
                keeper.line.close()
                _be(there, said, (keeper.port, f"job{keeper.jobs}"), (rank, size), mutation)
            there.close()
            self.ranks.append(Rank(pid, here, said))

    def play(self, setup: Setup, life: Life, number: int, root: Path, hangs_s: float = HANGS_S) -> Told:
        """One life. Ranks that do not come to its end, or die without being killed by the test, are a problem."""
        told = Told({rank: [] for rank in range(self.size)}, {rank: [] for rank in range(self.size)})
        for rank in self.ranks:
            rank.line.send((setup, life, number, root))
        lines = {rank.line: at for at, rank in enumerate(self.ranks)}
        deadline = time.monotonic() + hangs_s
        while lines and (left_s := deadline - time.monotonic()) > 0:
            for line in wait(list(lines), left_s):
                at = lines[line]  # type: ignore[index]
                try:
                    verb, words = line.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    del lines[line]  # type: ignore[arg-type]
                    self._ended(at, life, told)
                    deadline = min(deadline, time.monotonic() + hangs_s / 2)
                    continue
                _note(told, at, verb, words)
                if verb == "report":
                    del lines[line]  # type: ignore[arg-type]
        if lines:
            self._hung(sorted(lines.values()), told)
        return told

    def _ended(self, at: int, life: Life, told: Told) -> None:
        rank = self.ranks[at]
        _, status = os.waitpid(rank.pid, 0)
        rank.status = code = os.waitstatus_to_exitcode(status)
        if code in (-signal.SIGKILL, -signal.SIGALRM) and life.ending is Ending.KILLED:
            return
        how = f"of {signal.Signals(-code).name}" if code < 0 else f"with {code}"
        told.problems.append(f"it died {how}: rank {at}\n{rank.words()}")

    def _hung(self, late: list[int], told: Told) -> None:
        alive = [rank for rank in self.ranks if rank.status is None]
        for rank in alive:
            os.kill(rank.pid, signal.SIGUSR1)  # says where every thread is
        time.sleep(0.5)
        words = "\n".join(f"--- rank {at}\n{self.ranks[at].words()}" for at in late)
        told.problems.append(f"it hung: ranks {late}\n{words}")

    def end(self) -> None:
        for rank in self.ranks:
            rank.line.close()
            if rank.status is None:
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
            rank.said.close()


def _note(told: Told, at: int, verb: str, words: dict[str, Any]) -> None:
    if verb == "try":
        told.tries[at].append(words)
    elif verb == "load":
        told.loads[at].append(words)
    elif verb == "rewound":
        told.rewound.append(words["step"])
        told.loads[at] = [load for load in told.loads[at] if load["step"] <= words["step"]]  # others are saved anew
    elif verb == "escaped":
        told.escaped.add((words["position"], words["name"]))
    else:
        told.reports[at] = words
        told.problems.extend(words["problems"])


def _be(
    line: Connection, said: IO[str], board: tuple[int, str], place: tuple[int, int], mutation: str
) -> None:
    """This process is a rank from here on, and does not return."""
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    faulthandler.enable(said)
    faulthandler.register(signal.SIGUSR1, said)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        _serve(line, board, place, mutation)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # without the end of gloo's threads, which aborts one process in eight, whatever it has run


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
    """Jobs of every size that is asked for, as long as they last."""

    def __init__(self, mutation: str = "") -> None:
        self._keeper, self._mutation = Keeper(), mutation
        self._jobs: dict[int, Job] = {}

    def of(self, size: int) -> Job:
        if size not in self._jobs:
            self._jobs[size] = Job(self._keeper, size, self._mutation)
        return self._jobs[size]

    def drop(self, size: int) -> None:
        """Its ranks were killed, or are not to be trusted any more."""
        self._jobs.pop(size).end()

    def end(self) -> None:
        for size in list(self._jobs):
            self.drop(size)
        self._keeper.end()
