"""A line of progress on a terminal; silence when standard error is not one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_QUIET_FOR_S = 1.0  # what is over sooner needs no line


def terminal_progress(label: str) -> Callable[[int, int], None] | None:
    """A function to be told (done, total) bytes, or None when nobody is looking."""
    if not sys.stderr.isatty():
        return None
    started = time.monotonic()

    def show(done: int, total: int) -> None:
        elapsed = time.monotonic() - started
        if elapsed < _QUIET_FOR_S:
            return
        share = done / total if total else 1.0
        end = "\n" if done >= total else ""
        line = f"\r{label}: {share:4.0%}  {done / 1e9:.2f} of {total / 1e9:.2f} GB  {done / 1e9 / elapsed:.2f} GB/s "
        print(line, end=end, file=sys.stderr, flush=True)

    return show
