"""File descriptors that have an owner from the moment they are open.

A signal handler may raise an exception between the call that opens a descriptor and the assignment of its number. The
descriptor would then stay open. Handlers do not run inside a C call. So here one C call opens a descriptor and stores
it with its owner, and one C call removes it from there and closes it.
"""

from __future__ import annotations

import os
from collections import deque
from functools import partial
from itertools import repeat, starmap
from pathlib import Path


class Descriptors:
    """Descriptors of one owner, in the order in which they were opened. Dropping the object closes the open ones.

    in_use  whether the engine's threads may still use the descriptors; if so, dropping the object leaves these open
    """

    _in_use = True  # until __init__ has set it to False

    def __init__(self, *, in_use: bool = False) -> None:
        self._open: list[int] = []
        self._in_use = in_use

    def __len__(self) -> int:
        return len(self._open)

    def open(self, path: Path | str, flags: int, dir_fd: int | None = None) -> int:
        """`os.open` of a path; it is relative to the directory `dir_fd`, if that is given. Returns the descriptor."""
        self._open.extend(map(partial(os.open, path, flags, dir_fd=dir_fd), (0o644,)))
        return self._open[-1]

    def take(self, fd: int) -> None:
        """Own a descriptor that other code has opened."""
        self._open.append(fd)

    def close(self, leave: int = 0) -> None:
        """Close all but the first `leave` descriptors. Each is removed from the list before it is closed, since a child
        may be forked meanwhile.
        """
        deque(map(os.close, starmap(self._open.pop, repeat((), max(0, len(self._open) - leave)))), maxlen=0)

    def __del__(self) -> None:
        if not self._in_use:
            self.close()
