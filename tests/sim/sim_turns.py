"""Ranks that take turns: threads of one job on one simulated disk, in an order that a number determines.

A rank runs, wants to change the disk, waits for messages, or is done. Only when no rank runs, one that wants to change
the disk gets its turn, so that the order of all changes is reproducible. When all remaining ranks wait, time passes, so
that no test waits for a real deadline.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from sim_disk import Disk, PowerLoss

from flowstone.ranks.heartbeat import Activity, Heartbeat, RankStatus
from flowstone.store.system import System

TICK_S = 1.0
_State = Literal["runs", "wants", "waits", "frozen", "done"]


@dataclass(frozen=True, slots=True)
class Freeze:
    """A rank stops before change number `at`, until all others are done.

    after   or until they have made so many changes, if they get there
    spoilt  the change then fails
    """

    at: int
    after: int | None = None
    spoilt: bool = False


class Turns:
    """Whose turn it is, and what time; stands where agreements ask for the time and sleep.

    number  decides which rank goes first: the lowest rank, the highest, or any
    """

    def __init__(self, size: int, disk: Disk, *, number: int = 0, freeze: Freeze | None = None) -> None:
        self.size, self._disk, self._freeze = size, disk, freeze
        self._thaw_at = 0  # changes, while a rank is frozen
        chance = random.Random(number)
        orders: list[Callable[[list[int]], int]] = [min, max, chance.choice]
        self._choose = orders[number % 3]
        self._changed = threading.Condition()
        self._states: list[_State] = ["done"] * size
        self._last_beat: dict[int, float] = {}  # of those that are dead or frozen
        self._dead: set[int] = set()
        self._posts = 0
        self._here = threading.local()
        self._now = 0.0
        self._is_over = False

    def begin(self) -> None:
        """All ranks that live act again."""
        with self._changed:
            self._states = ["done" if rank in self._dead else "runs" for rank in range(self.size)]

    def done(self, rank: int) -> None:
        self._enter(rank, "done")

    def over(self) -> None:
        """From now on no rank waits for its turn."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def check(self, rank: int) -> None:
        """Raise where a rank would otherwise live on after its end."""
        if rank in self._dead and not self._is_over:
            raise PowerLoss

    def is_dead(self, rank: int) -> bool:
        return rank in self._dead

    def has_left(self, rank: int) -> bool:
        """Whether a rank has come to the end of what all do, or died: it posts nothing any more."""
        with self._changed:
            return self._states[rank] == "done"

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """To change the disk. A rank that loses its power here, or is killed, takes no further part."""
        with self._changed:
            self.check(rank)
            self._enter(rank, "wants")
            self._stay(rank)
        try:
            yield
        except PowerLoss:
            with self._changed:
                for index in range(self.size) if self._disk.lost else [rank]:
                    self._dead.add(index)
                    self._last_beat.setdefault(index, self._now)
                    self._states[index] = "done"
                self._pass_on()
                self._changed.notify_all()
            raise

    # What agreements ask

    def monotonic(self) -> float:
        return self._now

    def sleep(self, _: float) -> None:
        """Until something has been posted since this thread looked, or time has passed."""
        with self._changed:
            rank = self._here.rank
            self.check(rank)
            if self._is_over:
                self._now += TICK_S
            elif self._here.posts == self._posts:
                self._enter(rank, "waits")
                self._stay(rank)
            self._here.posts = None

    def looks(self, rank: int) -> None:
        """This thread, one of that rank's, looks at the board."""
        self.check(rank)
        self._here.rank = rank
        if getattr(self._here, "posts", None) is None:
            self._here.posts = self._posts

    def posted(self) -> None:
        with self._changed:
            self._posts += 1
            self._wake("waits")

    def beat(self, rank: int) -> float:
        return self._last_beat.get(rank, self._now)

    # States

    def _enter(self, rank: int, state: _State) -> None:
        with self._changed:
            if self._states[rank] != "done" or state == "done":
                self._states[rank] = state
            self._pass_on()

    def _stay(self, rank: int) -> None:
        while self._states[rank] not in ("runs", "done") and not self._is_over:
            self._changed.wait()
            self.check(rank)

    def _pass_on(self) -> None:
        if "runs" in self._states:
            return
        wanting = [rank for rank, state in enumerate(self._states) if state == "wants"]
        if wanting:
            rank = self._choose(wanting)
            made = len(self._disk.changes)
            if "frozen" in self._states and made >= self._thaw_at:
                self._thaw()
                return
            if self._freeze is not None and not self._thaw_at and made >= self._freeze.at:
                self._states[rank], self._thaw_at = "frozen", made + (self._freeze.after or 10_000)
                self._last_beat[rank] = self._now
                self._pass_on()
                return
            self._states[rank] = "runs"
        elif "waits" in self._states:
            self._now += TICK_S
            self._wake("waits")
        elif "frozen" in self._states:
            self._thaw()
        self._changed.notify_all()

    def _thaw(self) -> None:
        self._last_beat.clear()
        if self._freeze is not None and self._freeze.spoilt:
            self._disk.fail_at = len(self._disk.changes)
        self._wake("frozen")

    def _wake(self, entries: _State) -> None:
        self._states = ["runs" if state == entries else state for state in self._states]
        self._changed.notify_all()


class RankDisk(System):
    """The disk as one rank changes it: when it is its turn."""

    def __init__(self, disk: Disk, turns: Turns, rank: int) -> None:
        self._disk, self._turns, self._rank = disk, turns, rank
        self.before_change: Callable[[], None] = lambda: None

    def _turn(self) -> AbstractContextManager[None]:
        self.before_change()
        return self._turns.turn(self._rank)

    def check_power(self) -> None:
        self._turns.check(self._rank)

    def make_directory(self, path: Path, parent: int | None = None) -> None:
        with self._turn():
            self._disk.make_directory(path, parent)

    def create(self, path: Path, flags: int, parent: int | None = None) -> int:
        with self._turn():
            return self._disk.create(path, flags, parent)

    def resize(self, fd: int, size_bytes: int) -> None:
        with self._turn():
            self._disk.resize(fd, size_bytes)

    def reserve(self, fd: int, size_bytes: int) -> None:
        with self._turn():
            self._disk.reserve(fd, size_bytes)

    def write(self, fd: int, content: bytes) -> None:
        with self._turn():
            self._disk.write(fd, content)

    def extend(self, fd: int, size_bytes: int) -> None:
        with self._turn():
            self._disk.extend(fd, size_bytes)

    def write_at(self, fd: int, parts: Sequence[memoryview], offset_bytes: int) -> None:
        with self._turn():
            self._disk.write_at(fd, parts, offset_bytes)

    def sync_bytes(self, fd: int) -> None:
        with self._turn():
            self._disk.sync_bytes(fd)

    def sync(self, fd: int) -> None:
        with self._turn():
            self._disk.sync(fd)

    def sync_directory(self, path: Path, fd: int | None = None) -> None:
        with self._turn():
            self._disk.sync_directory(path, fd)

    def rename(self, source: Path, target: Path, source_at: int | None = None, target_at: int | None = None) -> None:
        with self._turn():
            self._disk.rename(source, target, source_at, target_at)

    def link(self, source: Path, target: Path, source_at: int | None = None, target_at: int | None = None) -> None:
        with self._turn():
            self._disk.link(source, target, source_at, target_at)

    def exchange(self, path: Path, other: Path, parent: int) -> None:
        with self._turn():
            self._disk.exchange(path, other, parent)

    def unlink(self, path: Path, parent: int | None = None) -> None:
        with self._turn():
            self._disk.unlink(path, parent)

    def remove_directory(self, path: Path, parent: int | None = None) -> None:
        with self._turn():
            self._disk.remove_directory(path, parent)


class StillHeartbeat(Heartbeat):
    """Says once that its rank is there, in a call."""

    def __init__(self, kv_store: RankStore, rank: int, label: str, activity: object, *, every_s: float) -> None:
        super().__init__(kv_store, rank, label, lambda: Activity(is_inside=True), every_s=3600)


class RankStore:
    """The job's board as one rank sees it. Heartbeats go on by themselves, as long as a rank lives."""

    def __init__(self, values: dict[str, bytes], turns: Turns, rank: int) -> None:
        self._values, self._turns, self._rank = values, turns, rank

    def set(self, key: str, value: bytes) -> None:
        self._turns.check(self._rank)
        self._values[key] = value
        self._turns.posted()

    def get(self, key: str) -> bytes:
        self._turns.check(self._rank)
        kind, _, rest = key.partition("/")
        if kind != "at":
            return self._values[key]
        text = msgspec.msgpack.decode(self._values[key], type=RankStatus)
        beat = self._turns.beat(int(rest.partition("/")[0]))
        return msgspec.msgpack.encode(msgspec.structs.replace(text, beat=int(beat / TICK_S)))

    def check(self, keys: list[str]) -> bool:
        self._turns.looks(self._rank)
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._turns.check(self._rank)
        result = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(result).encode()
        return result

    def delete_key(self, key: str) -> bool:
        self._turns.check(self._rank)
        return self._values.pop(key, None) is not None
