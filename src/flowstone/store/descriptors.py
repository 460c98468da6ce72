"""File descriptors that have an owner from the moment they are open.

Between the call that opens a descriptor and the assignment of its number, a signal handler may raise; then the
descriptor would leak. Handlers do not run inside of a C call: here, one C call both opens a descriptor and stores it
with its owner, or removes it from there and closes it.
"""

from __future__ import annotations

import os
from collections import deque
from functools import partial
from itertools import repeat, starmap
from pathlib import Path


class Descriptors:
    """Descriptors of one owner, in the order in which they were opened. Dropping the object closes the rest.

    in_use  threads of the engine may still use them: then dropping the object leaves them open
    """

    _in_use = True  # until __init__ has set it

    def __init__(self, *, in_use: bool = False) -> None:
        self._open: list[int] = []
        self._in_use = in_use

    def __len__(self) -> int:
        return len(self._open)

    def open(self, path: Path | str, flags: int, at: int | None = None) -> int:
        """`os.open`; the entry is looked up in the directory `at`, if given."""
        self._open.extend(map(partial(os.open, path, flags, dir_fd=at), (0o644,)))
        return self._open[-1]

    def take(self, fd: int) -> None:
        """Own a descriptor that other code has opened."""
        self._open.append(fd)

    def close(self, leave: int = 0) -> None:
        """Close all but the first `leave`. Each is removed from the list first, since a child may be forked meanwhile.
        """
        deque(map(os.close, starmap(self._open.pop, repeat((), max(0, len(self._open) - leave)))), maxlen=0)

    def __del__(self) -> None:
        if not self._in_use:
            self.close()
