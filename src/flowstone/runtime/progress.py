"""A bar of progress on a terminal; silence when standard error is not one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import IO, TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from rich.progress import Progress

_QUIET_FOR_S = 1.0  # shorter work needs no bar


def say(line: str, end: str = "\n") -> bool:
    """Print to standard error. Returns whether that worked; a closed stream is ignored, so that the work goes on."""
    try:
        print(line, end=end, file=sys.stderr, flush=True)
    except Exception:  # a terminal that was closed, or a replaced stream
        return False
    return True


@contextmanager
def terminal_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many bytes are done: the yielded function takes these, and the total."""
    with _shown("bytes") as show:
        yield partial(show, what)


def terminal_steps() -> AbstractContextManager[Callable[[str, int, int], None]]:
    """Show how many steps are done: the yielded function takes the name of the last one, this number, and the total."""
    return _shown("steps")


@contextmanager
def _shown(unit: Literal["bytes", "steps"]) -> Iterator[Callable[[str, int, int], None]]:
    if not _is_terminal():
        yield lambda _what, _done, _total: None
        return
    started = time.monotonic()
    bar: Progress | None = None

    def show(what: str, done: int, total: int) -> None:
        nonlocal bar
        if bar is None and time.monotonic() - started < _QUIET_FOR_S:
            return
        if bar is None:
            bar = stack.enter_context(_make_bar(unit))
            bar.add_task(what)
        bar.update(bar.task_ids[0], description=what, completed=done, total=total, refresh=True)

    with ExitStack() as stack:
        yield show


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except Exception:  # none, a closed one, or a replaced one
        return False


class _Terminal:
    """Standard error for rich, which would end the process where it is closed: nothing more is written to it then."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._is_open = True

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._is_open = self._is_open and say(text, end="")
        return len(text)

    def flush(self) -> None:
        """`write` has flushed."""


def _make_bar(unit: Literal["bytes", "steps"]) -> Progress:
    """It starts no thread, and leaves `sys.stdout` alone."""
    from rich import progress
    from rich.console import Console

    amounts = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    return progress.Progress(
        progress.BarColumn(bar_width=24), *(amounts if unit == "bytes" else (progress.MofNCompleteColumn(),)),
        progress.TimeRemainingColumn(), progress.TextColumn("{task.description}", markup=False),
        console=Console(file=cast("IO[str]", _Terminal())), auto_refresh=False, transient=True, redirect_stdout=False,
        redirect_stderr=False,
    )
