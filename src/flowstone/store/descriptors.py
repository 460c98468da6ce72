"""Descriptors that have an owner from the instant at which they are open.

Between the call that opens one and the name that it is given, a signal's handler may raise: then nobody closes it. No
handler runs inside of a call of C: here one such call both opens it and puts it where its owner looks, or takes it
from there and closes it.
"""

from __future__ import annotations

import os
from collections import deque
from functools import partial
from itertools import repeat, starmap
from pathlib import Path


class Descriptors:
    """Some of one owner, in the order in which they were opened. What is not closed is, once they are dropped.

    in_use  threads of the engine may use them yet: what is not closed stays open
    """

    _in_use = True  # until it is there

    def __init__(self, *, in_use: bool = False) -> None:
        self._open: list[int] = []
        self._in_use = in_use

    def __len__(self) -> int:
        return len(self._open)

    def open(self, path: Path | str, flags: int, at: int | None = None) -> int:
        """`os.open`; the entry is looked up in the directory `at`, where given."""
        self._open.extend(map(partial(os.open, path, flags, dir_fd=at), (0o644,)))
        return self._open[-1]

    def take(self, fd: int) -> None:
        """Have one that somebody else has opened."""
        self._open.append(fd)

    def close(self, leave: int = 0) -> None:
        """All but the first `leave`. Each is first forgotten, as a child may be forked meanwhile."""
        deque(map(os.close, starmap(self._open.pop, repeat((), max(0, len(self._open) - leave)))), maxlen=0)

    def __del__(self) -> None:
        if not self._in_use:
            self.close()
