"""Ranks as threads that communicate over one real TCPStore; tests of deadlines use a simulated clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from flowstone.config import TREE_FAN
from flowstone.ranks.agreement import Agreement, Timeouts
from flowstone.ranks.kv_store import KeyValueStore


class Clock:
    """Time that passes only while all threads of a job sleep: no deadline comes because a thread got no processor.

    It stands still while ranks do nothing. Heartbeats, which sleep between two reports, are waited for like ranks.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0.0
        self._acts = self._awake = 0
        self._sleepers: dict[threading.Thread, float] = {}  # when each wakes up

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """By a thread that is within `awake`, or by a heartbeat's."""
        self._stay(seconds, lambda: False)

    @contextmanager
    def awake(self, count: int) -> Iterator[Callable[[], None]]:
        """So many threads begin to act; each calls what this gives once it has ended."""
        with self._changed:
            self._acts += count
            self._awake += count
        yield self._end_one

    def passes(self, seconds: float) -> None:
        """While no rank acts."""
        with self.awake(1) as end:
            self.sleep(seconds)
            end()

    def _end_one(self) -> None:
        with self._changed:
            self._acts -= 1
            self._fall_asleep()

    def _stay(self, seconds: float, is_over: Callable[[], bool]) -> None:
        thread = threading.current_thread()
        with self._changed:
            self._sleepers[thread] = self._now + seconds
            self._fall_asleep()
            while thread in self._sleepers and not is_over():
                self._changed.wait()
            if self._sleepers.pop(thread, None) is not None:
                self._awake += 1

    def _fall_asleep(self) -> None:
        self._awake -= 1
        if self._acts and not self._awake:
            self._now = min(self._sleepers.values())
            due = [thread for thread, wakes_at in self._sleepers.items() if wakes_at <= self._now]
            for thread in due:
                del self._sleepers[thread]
            self._awake += len(due)
            self._changed.notify_all()


class HeartbeatThreading:
    """Stands for the module `threading` where a heartbeat asks it for an event and a thread."""

    current_thread, main_thread = staticmethod(threading.current_thread), staticmethod(threading.main_thread)

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def Event(self) -> _Stopped:
        return _Stopped(self._clock)

    def Thread(self, target: Callable[[], None], name: str, daemon: bool) -> threading.Thread:
        def beat() -> None:
            target()
            with self._clock._changed:
                self._clock._fall_asleep()  # for good

        with self._clock._changed:
            self._clock._awake += 1
        return threading.Thread(target=beat, name=name, daemon=daemon)


class _Stopped:
    """That a heartbeat is stopped: it wakes up at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._is_set = clock, False

    def set(self) -> None:
        with self._clock._changed:
            self._is_set = True
            self._clock._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        if not self._is_set:
            self._clock._stay(seconds, lambda: self._is_set)
        return self._is_set


class Job:
    """`size` ranks; what each does runs in a thread of its own."""

    clock: Clock | None = None  # that all jobs of a test have, by the fixture `impatient`

    def __init__(self, size: int, *, fan: int = TREE_FAN, **timeouts: float) -> None:
        self.size = size
        self.server = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)
        # Few connections: each costs a look-up of its name. No call waits in one, so ranks may share them.
        connections = [self.server.clone() for _ in range(min(size, 4))]
        self.kv_stores: list[KeyValueStore] = [dist.PrefixStore("job", connections[rank % 4]) for rank in range(size)]
        self.ranks = [
            Agreement(kv_store, rank, size, fan=fan, timeouts=Timeouts(**timeouts))
            for rank, kv_store in enumerate(self.kv_stores)
        ]

    def run(self, act: Callable[[Agreement], Any], *, ranks: list[int] | None = None) -> list[Any]:
        """What each rank's act gave, or raised."""
        chosen = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        return self.run_all([partial(act, rank) for rank in chosen])

    def run_all(self, acts: Sequence[Callable[[], Any]]) -> list[Any]:
        """As `run`, of acts that know their ranks."""
        with ThreadPoolExecutor(len(acts)) as threads, (self.clock or _NoClock()).awake(len(acts)) as end:

            def act_in_time(act: Callable[[], Any]) -> object:
                try:
                    return act()
                finally:
                    end()

            futures = [threads.submit(act_in_time, act) for act in acts]
        return [future.exception() or future.result() for future in futures]


class _NoClock:
    @contextmanager
    def awake(self, count: int) -> Iterator[Callable[[], None]]:
        yield lambda: None
