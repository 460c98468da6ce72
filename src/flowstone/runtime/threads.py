"""The threads of a Checkpointer. A thread that a save depends on is started before the save begins."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from flowstone.errors import StorageError
from flowstone.log import log
from flowstone.runtime.signal_shield import Latch


class Threads:
    """The four threads of one Checkpointer; docs/ARCHITECTURE.md, Threads, says what each may access.

    writer    finishes saves, one after the other
    watcher   waits for captures (copies of the state) that end only after `save` has returned
    reserver  reserves space for segments
    remover   removes files of expired steps: a file system may take a second for a few GB
    """

    def __init__(self, initializer: Callable[[], None], before_removal: Callable[[], None]) -> None:
        """Starts no thread yet. `initializer` is called on each thread when the thread starts. `before_removal` is
        called before each directory is emptied.
        """
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="flowstone-commit", initializer=initializer)
        self.watcher = ThreadPoolExecutor(1, thread_name_prefix="flowstone-capture", initializer=initializer)
        self.reserver = ThreadPoolExecutor(1, thread_name_prefix="flowstone-reserve", initializer=initializer)
        self.remover = ThreadPoolExecutor(1, thread_name_prefix="flowstone-remove", initializer=initializer)
        self._before_removal = before_removal
        self._removed: Latch | None = None  # opens after the last removal
        self.are_started = False

    def start(self) -> None:
        """Start the threads that a save needs to finish. Reserver and remover start with their first task."""
        start_threads(self.writer, self.watcher)
        self.are_started = True

    def end(self, *, wait: bool = True) -> None:
        """End the threads. `wait`: whether to wait for their remaining work."""
        for executor in (self.watcher, self.writer, self.reserver, self.remover):
            executor.shutdown(wait=wait)

    def remove(self, owner: Callable[[], object], acts: Sequence[Callable[[], None]]) -> None:
        """Queue `acts` for the thread `remover`; each of them empties a directory. The result of `owner` is kept alive
        until they have run.
        """
        removed = Latch()

        def run(kept: list[object]) -> None:
            if removed.is_open:  # the call was run below, as no thread could be started at that time
                return
            try:
                for act in acts:
                    self._before_removal()
                    act()
            except Exception:
                # otherwise the exception would be lost, since nothing reads this thread's result
                log.exception("retention failed")
            finally:
                # done before the latch opens, since the next Checkpointer of this store waits for the latch
                kept.clear()
                removed.open()

        self._removed = removed
        try:
            self.remover.submit(run, [owner()])
        except RuntimeError:  # Python is ending, or the system refuses a thread
            run([])

    def await_removals(self) -> None:
        """Wait until the thread `remover` has finished all removals that were queued so far."""
        if self._removed is not None:
            self._removed.wait()


def start_threads(*executors: ThreadPoolExecutor) -> None:
    """Start the one thread of each executor before a save depends on it.

    No signal handler may interrupt this call. Ctrl-C during a start would leave a thread that its executor does not
    know. The executor would never end that thread, and Python would wait for it at exit.

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


def run_on_thread(executor: ThreadPoolExecutor, act: Callable[[], None]) -> None:
    """Run `act` on the executor's thread, which the first call starts; run it on this thread if that fails.

    A thread cannot be started if Python is ending, or the system refuses it. In that case `act` may run twice: on this
    thread, and later on the executor's.
    """
    try:
        executor.submit(act)
    except RuntimeError:
        act()


def call_keeping_alive(_: object, act: Callable[..., None], *arguments: object) -> None:
    """Call `act`; the first argument stays alive while the call is queued or runs."""
    act(*arguments)
