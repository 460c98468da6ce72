"""The threads of a Checkpointer: those that a save depends on are started all at once, and whole."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from flowstone.errors import StorageError


class Threads:
    """Three, of one Checkpointer; docs/ARCHITECTURE.md, Threads, says what each may touch.

    writer    finishes saves, one after the other
    watcher   waits for captures that outlast `save`
    reserver  gives segments their size
    """

    def __init__(self, initializer: Callable[[], None]) -> None:
        """Starts none of them. `initializer` is called on each."""
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="flowstone-commit", initializer=initializer)
        self.watcher = ThreadPoolExecutor(1, thread_name_prefix="flowstone-capture", initializer=initializer)
        self.reserver = ThreadPoolExecutor(1, thread_name_prefix="flowstone-reserve", initializer=initializer)
        self.are_started = False

    def start(self) -> None:
        """Start what a save under way could not be finished without. The reserver's starts with its first act."""
        start(self.writer, self.watcher)
        self.are_started = True

    def end(self, *, wait: bool = True) -> None:
        """`wait` for what they still have to do."""
        for executor in (self.watcher, self.writer, self.reserver):
            executor.shutdown(wait=wait)


def start(*executors: ThreadPoolExecutor) -> None:
    """Start the one thread of each while nothing depends on them: a save under way could not be finished without.

    To be called uninterrupted: in the middle of a start, Ctrl-C leaves a thread that nobody knows of. Its executor
    never ends it, and Python waits for it when the script is over.

    raises  StorageError when the system has no thread for them
    """
    try:
        for executor in executors:
            executor.submit(int).result()
    except RuntimeError as error:
        raise StorageError(
            "cannot start the threads that finish saves", errno=errno.EAGAIN, reason=str(error),
            next="raise the limits on threads and processes (ulimit -u, pids.max)",
        ) from error


def hand_over(executor: ThreadPoolExecutor, act: Callable[[], None]) -> None:
    """Do it on the executor's thread, which is started by the first act; here, where that cannot be done.

    Python is ending, or the system has no thread. An act that is done here then may be done there, too.
    """
    try:
        executor.submit(act)
    except RuntimeError:
        act()
