"""A progress bar on a terminal; nothing if standard error is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import IO, TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from rich.progress import Progress

_QUIET_FOR_S = 1.0  # work that takes less than this number of seconds needs no bar


def print_stderr(line: str, end: str = "\n") -> bool:
    """Print a line to standard error. Returns False if the stream is closed; that is no error, so the work continues.
    """
    try:
        print(line, end=end, file=sys.stderr, flush=True)
    except Exception:  # the terminal was closed, or the stream was replaced
        return False
    return True


@contextmanager
def terminal_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many bytes are done. The yielded function is called with the number of bytes done and the total."""
    with _shown("bytes") as show:
        yield partial(show, title)


def terminal_steps() -> AbstractContextManager[Callable[[str, int, int], None]]:
    """Show how many steps are done. The yielded function is called with the last step's name, the number of steps done,
    and the total.
    """
    return _shown("steps")


@contextmanager
def _shown(unit: Literal["bytes", "steps"]) -> Iterator[Callable[[str, int, int], None]]:
    if not _is_terminal():
        yield lambda _title, _done, _total: None
        return
    started = time.monotonic()
    bar: Progress | None = None

    def show(title: str, done: int, total: int) -> None:
        nonlocal bar
        if bar is None and time.monotonic() - started < _QUIET_FOR_S:
            return
        if bar is None:
            bar = stack.enter_context(_make_bar(unit))
            bar.add_task(title)
        bar.update(bar.task_ids[0], description=title, completed=done, total=total, refresh=True)

    with ExitStack() as stack:
        yield show


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except Exception:  # there is no standard error, or it was closed or replaced
        return False


class _Terminal:
    """Standard error, as the file that rich writes to. Once standard error is closed, writes do nothing; an error in
    `write` would make rich end the process.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self._is_open = True

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._is_open = self._is_open and print_stderr(text, end="")
        return len(text)

    def flush(self) -> None:
        """Does nothing, since `write` has already flushed."""


def _make_bar(unit: Literal["bytes", "steps"]) -> Progress:
    """A progress bar that starts no thread, and does not touch `sys.stdout`."""
    from rich import progress
    from rich.console import Console

    amounts = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    return progress.Progress(
        progress.BarColumn(bar_width=24), *(amounts if unit == "bytes" else (progress.MofNCompleteColumn(),)),
        progress.TimeRemainingColumn(), progress.TextColumn("{task.description}", markup=False),
        console=Console(file=cast("IO[str]", _Terminal())), auto_refresh=False, transient=True, redirect_stdout=False,
        redirect_stderr=False,
    )
