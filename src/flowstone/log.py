"""The log of Flowstone: `log` writes to the standard logger "flowstone", and is safe on any thread.

If a signal handler of the training script raises an exception while `logging` holds one of its locks, the main thread
keeps that lock. The main thread can acquire the lock again, because it is re-entrant, but every other thread would wait
for it for ever, and so would a save. So one separate thread writes the lines of all threads of Flowstone. A save waits
for a line only for a limited time.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from queue import SimpleQueue
from typing import Any, NamedTuple

_OURS = "flowstone-"  # prefix of the names of all threads of Flowstone
_WRITTEN_WITHIN_S = 1.0  # a thread waits at most this long for its line; after a timeout, threads wait no more
_LINES_MAX = 1000  # length of the queue; further lines are dropped


class _Log(logging.LoggerAdapter[logging.Logger]):
    """A logger that never takes a lock of `logging` on a thread of Flowstone."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger)
        self._lines = _Lines()

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name of the standard library
        logger = self.logger  # LoggerAdapter.isEnabledFor would take a lock
        return not logger.disabled and level > logger.manager.disable and level >= logger.getEffectiveLevel()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        thread = threading.current_thread().name
        if not thread.startswith(_OURS) or thread == _Lines.THREAD:
            self.logger.log(level, msg, *args, stacklevel=2, **kwargs)
            return
        raised = sys.exc_info() if kwargs.get("exc_info") else None
        path, line, function, _ = self.logger.findCaller(stacklevel=2)
        record = self.logger.makeRecord(
            self.name, level, path, line, msg, args, raised, function, kwargs.get("extra")
        )
        # The message is formatted now: the record may wait in the queue, and must keep no objects alive except `extra`.
        record.msg, record.args = record.getMessage(), None
        self._lines.write(self.logger, record)


class _Line(NamedTuple):
    logger: logging.Logger
    record: logging.LogRecord
    written: threading.Lock  # locked until the line is written


class _Lines:
    """A queue of lines, and the thread that writes them, which the first line starts."""

    THREAD = "flowstone-log"
    _is_stuck: bool

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)  # a child does not have this thread

    def write(self, logger: logging.Logger, record: logging.LogRecord) -> None:
        """Queue a record, and wait, for a limited time, until it is written, so that lines keep their order."""
        if not self._has_thread():
            logger.handle(record)
            return
        if self._queue.qsize() >= _LINES_MAX:
            return
        line = _Line(logger, record, threading.Lock())
        line.written.acquire()
        self._queue.put(line)
        if not self._is_stuck:
            self._is_stuck = not line.written.acquire(timeout=_WRITTEN_WITHIN_S)

    def _forget(self) -> None:
        self._queue: SimpleQueue[_Line] = SimpleQueue()  # put is one C call that never waits
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._is_stuck = False

    def _has_thread(self) -> bool:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self.THREAD, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # Python is ending, or the system refuses a thread
                    return False
                self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            line = self._queue.get()
            try:
                line.logger.handle(line.record)
            except Exception:  # raised by a filter
                _NO_HANDLER.handleError(line.record)
            finally:
                self._is_stuck = False
                line.written.release()
                del line


_NO_HANDLER = logging.NullHandler()
log = _Log(logging.getLogger("flowstone"))
