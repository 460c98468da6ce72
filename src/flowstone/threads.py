"""The conductor's threads are started all at once, and whole: no Ctrl-C leaves one of them half started."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from flowstone.errors import StorageError


def start(*executors: ThreadPoolExecutor) -> None:
    """Start the one thread of each while nothing depends on them: a save under way could not be finished without.

    From a thread of its own, for Python raises KeyboardInterrupt in the main one alone. In the middle of a start, that
    leaves a thread that nobody knows of: its executor never ends it, and Python waits for it when the script is over.

    raises  StorageError when the system has no thread for them
    """
    started: Future[None] = Future()
    try:
        threading.Thread(target=_start, args=(executors, started), name="flowstone-start").start()
        started.result()
    except RuntimeError as error:
        raise StorageError(
            "cannot start the threads that end saves", errno=errno.EAGAIN, reason=str(error),
            next="raise the limits on threads and processes (ulimit -u, pids.max)",
        ) from error


def _start(executors: tuple[ThreadPoolExecutor, ...], started: Future[None]) -> None:
    try:
        for executor in executors:
            executor.submit(int).result()
    except BaseException as error:
        started.set_exception(error)
    else:
        started.set_result(None)
