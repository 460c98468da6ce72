"""A line of progress on a terminal; silence when standard error is not one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_FOR_S = 1.0  # shorter work needs no line


def terminal_progress(label: str) -> Callable[[int, int], None] | None:
    """A function that takes (done, total) in bytes, or None if standard error is not a terminal."""
    if not _somebody_looks():
        return None
    started, gone = time.monotonic(), False

    def show(done: int, total: int) -> None:
        nonlocal gone
        elapsed = time.monotonic() - started
        if elapsed < _QUIET_FOR_S or gone:
            return
        share = done / total if total else 1.0
        end = "\n" if done >= total else ""
        line = f"\r{label}: {share:4.0%}  {done / 1e9:.2f} of {total / 1e9:.2f} GB  {done / 1e9 / elapsed:.2f} GB/s "
        gone = not say(line, end=end)

    return show


def say(line: str, end: str = "\n") -> bool:
    """Print to standard error. Returns whether that worked; a closed stream is ignored, so that the work goes on."""
    try:
        print(line, end=end, file=sys.stderr, flush=True)
    except Exception:  # a terminal that was closed, or a replaced stream
        return False
    return True


def _somebody_looks() -> bool:
    try:
        return sys.stderr.isatty()
    except Exception:  # none, a closed one, or a replaced one
        return False


@contextmanager
def terminal_steps(label: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar for `total` steps, with the time left. Call the yielded function after each step, with the step's name."""
    if not _somebody_looks():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    last = TextColumn("{task.fields[step]}", markup=False)
    with Progress(*columns, last, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total, step="")
        yield lambda step: progress.update(task, advance=1, step=step)
