"""The threads of a Checkpointer. Those that a save depends on are started together, before the save begins."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from flowstone.errors import StorageError
from flowstone.log import log
from flowstone.runtime.uninterrupted import Latch


class Threads:
    """The four threads of one Checkpointer; docs/ARCHITECTURE.md, Threads, says what each may touch.

    writer    finishes saves, one after the other
    watcher   waits for captures that outlast `save`
    reserver  gives segments their size
    remover   removes files that retention gives up: a file system may take a second for a few GB
    before_removal  is called before each directory of these
    """

    def __init__(self, initializer: Callable[[], None]) -> None:
        """Starts no thread. `initializer` is called on each."""
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="flowstone-commit", initializer=initializer)
        self.watcher = ThreadPoolExecutor(1, thread_name_prefix="flowstone-capture", initializer=initializer)
        self.reserver = ThreadPoolExecutor(1, thread_name_prefix="flowstone-reserve", initializer=initializer)
        self.remover = ThreadPoolExecutor(1, thread_name_prefix="flowstone-remove", initializer=initializer)
        self.before_removal: Callable[[], None] = _nothing
        self._removed: Latch | None = None  # behind the last removal
        self.are_started = False

    def start(self) -> None:
        """Start the threads that a save needs in order to finish. The reserver's starts with its first task."""
        start(self.writer, self.watcher)
        self.are_started = True

    def end(self, *, wait: bool = True) -> None:
        """End the threads; `wait` for their remaining work."""
        for executor in (self.watcher, self.writer, self.reserver, self.remover):
            executor.shutdown(wait=wait)

    def remove(self, owner: Callable[[], object], acts: Sequence[Callable[[], None]]) -> None:
        """Have the remover call `acts`, of which each empties a directory. What `owner` gives is kept until then."""
        removed = Latch()

        def run(_: object) -> None:
            if removed.is_open:  # it ran where no thread could be started, and now there is one
                return
            try:
                for act in acts:
                    self.before_removal()
                    act()
            except Exception:
                log.exception("retention failed")  # on this thread, an exception would be lost
            finally:
                removed.open()

        self._removed = removed
        try:
            self.remover.submit(run, owner())
        except RuntimeError:  # Python is ending, or the system refuses a thread
            run(None)

    def await_removals(self) -> None:
        """Wait until the remover has done what it was given so far."""
        if self._removed is not None:
            self._removed.wait()


def _nothing() -> None: ...


def start(*executors: ThreadPoolExecutor) -> None:
    """Start the one thread of each executor before a save depends on it.

    Call it uninterrupted: Ctrl-C in the middle of a start leaves a thread that its executor does not know. The
    executor never ends that thread, and Python waits for it at exit.

    raises  StorageError if the system refuses a thread
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
    """Run `act` on the executor's thread, which the first act starts; run it here if that fails.

    It fails when Python is ending, or the system refuses a thread. An act that ran here may then also run there.
    """
    try:
        executor.submit(act)
    except RuntimeError:
        act()


def while_held(_: object, act: Callable[..., None], *arguments: object) -> None:
    """Call `act`; the first argument stays alive while this is queued or runs."""
    act(*arguments)
