"""Signal handlers that raise an exception at a line that a test chooses, or after some time."""

from __future__ import annotations

import dis
import gc
import os
import signal
import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_QUIET = {dis.opmap["POP_EXCEPT"], dis.opmap["NOP"]}
_END_OF_WITH = [dis.opmap[name] for name in ("LOAD_CONST", "LOAD_CONST", "LOAD_CONST", "PRECALL", "CALL")]
_SWAP, _CACHE = dis.opmap["SWAP"], dis.opmap["CACHE"]
_STANDARD = os.path.dirname(os.__file__)


class Struck(BaseException):
    """The exception that the handler raises."""


def struck(act: Callable[[], _Result], line: int, *, of: Collection[str] = (), opcodes: bool = False) -> _Result:
    """Call it, and raise at its line number `line`, or at a return, counted over all code that it runs on this thread.

    Four places are left out, at which no signal handler runs or which cannot survive an exception:

    - the standard library, whose own locks would stay locked;
    - the end of an `except` block: if a trace function raises there, CPython 3.11 keeps that exception, with all
      frames of its traceback, as the one that the thread handles;
    - between `with` and its block, and between that block and its end: a lock would stay locked;
    - code that the garbage collector calls, such as Hypothesis' timer: the exception would be lost.

    of       only lines of files with these names count
    opcodes  counts instructions instead of lines
    """
    left = line
    instants = ("opcode",) if opcodes else ("line", "return")

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if _STANDARD in frame.f_code.co_filename and "site-packages" not in frame.f_code.co_filename:
            return None
        if any(frame.f_code is getattr(callback, "__code__", None) for callback in gc.callbacks):
            return None
        if of and os.path.basename(frame.f_code.co_filename) not in of:
            return None
        frame.f_trace_opcodes = opcodes
        if event in instants:
            left -= 1
            if left <= 0 and not _is_quiet(frame):
                sys.settrace(None)
                raise Struck(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        return trace

    sys.settrace(trace)
    try:
        return act()
    finally:
        sys.settrace(None)


def _is_quiet(frame: FrameType) -> bool:
    """Whether no signal handler can run before the next instruction."""
    code, position = frame.f_code.co_code, frame.f_lasti
    if code[position] in _QUIET:
        return True
    if code[position] == _SWAP:  # the value that the block returns
        position += 2
    following = [op for op in code[position : position + 20 : 2] if op != _CACHE]
    return following[: len(_END_OF_WITH)] == _END_OF_WITH


def alarmed(act: Callable[[], _Result], delay_s: float) -> _Result:
    """Call it, and let the handler of a real signal raise after this time."""
    armed = True

    def strike(*_: object) -> None:
        if armed:
            raise Struck("by SIGALRM")

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        try:
            return act()
        except RuntimeError as error:
            if isinstance(error.__context__, Struck):  # raised by the standard library, which released a lock twice
                raise error.__context__ from None
            raise
        finally:
            armed = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
