"""The log of Flowstone: `log`, the standard logger "flowstone" as code on any thread may use it.

`logging` takes its locks between bytecodes. An exception that a signal handler of the training script raises there
leaves one locked by the main thread, which can take it again, as they are re-entrant; every other thread would wait for
it for ever, and a save with it. So a line from a thread of Flowstone is written by one more, on which nothing depends.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from queue import SimpleQueue
from types import FrameType
from typing import Any, NamedTuple

_OURS = "flowstone-"  # what the names of all threads of Flowstone begin with
_WRITTEN_WITHIN_S = 1.0  # a line later than this is waited for no longer, nor are those after it until it is there
_LINES_MAX = 1000  # that wait to be written; more are dropped


class _Log(logging.LoggerAdapter[logging.Logger]):
    """Adds to a logger that no thread of Flowstone ever takes a lock of `logging`."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger)
        self._lines = _Lines()

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name of the standard library
        logger = self.logger  # its own isEnabledFor locks
        return not logger.disabled and level > logger.manager.disable and level >= logger.getEffectiveLevel()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        thread = threading.current_thread().name
        if not thread.startswith(_OURS) or thread == _Lines.THREAD:
            self.logger.log(level, msg, *args, stacklevel=2, **kwargs)
            return
        raised = sys.exc_info() if kwargs.get("exc_info") else None
        caller = _caller()
        code, line = caller.f_code, caller.f_lineno
        record = self.logger.makeRecord(
            self.name, level, code.co_filename, line, msg, args, raised, code.co_name, kwargs.get("extra")
        )
        # Text: the record may wait, and keeps nothing alive but what the caller gave as `extra`.
        record.msg, record.args = record.getMessage(), None
        self._lines.write(self.logger, record)


class _Line(NamedTuple):
    logger: logging.Logger
    record: logging.LogRecord
    written: threading.Lock  # locked until then


class _Lines:
    """Lines on their way to the thread that writes them, which the first line starts."""

    THREAD = "flowstone-log"
    _is_stuck: bool

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)  # which has no such thread

    def write(self, logger: logging.Logger, record: logging.LogRecord) -> None:
        """Have a record written, and wait for it, so that lines keep their order; but no save waits for it for ever."""
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
        self._queue: SimpleQueue[_Line] = SimpleQueue()  # put is one C call, and waits for nothing
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._is_stuck = False

    def _has_thread(self) -> bool:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self.THREAD, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # Python ends, or the system is out of threads
                    return False
                self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            line = self._queue.get()
            try:
                line.logger.handle(line.record)
            except Exception:  # of a filter
                _NO_HANDLER.handleError(line.record)
            finally:
                self._is_stuck = False
                line.written.release()
                del line


def _caller() -> FrameType:
    """The frame that has called a method of `log`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, logging.__file__):
        frame = frame.f_back
    return frame or sys._getframe(1)


_NO_HANDLER = logging.NullHandler()
log = _Log(logging.getLogger("flowstone"))
