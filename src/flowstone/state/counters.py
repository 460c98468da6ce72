"""Version counters: torch counts the in-place operations on a tensor; all views of a tensor share the count.

If a counter changed between `save` and the end of the capture, the tensor was changed too early, even if only in one
element. An unchanged counter proves nothing: fused kernels, `.data` and numpy do not increment it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone.state.framework import FRAMEWORK
from flowstone.table.chunks import distinct
from flowstone.table.pieces import Layout


class VersionCounters:
    """The version counters of a state's tensors, read when the tensors were listed. One entry for each tensor.

    tensors  every tensor in the state; kept alive, so that the same objects are read again
    owners   the storage that the tensor had when it was listed; `address`: the tensor's address in memory then
    counted  the tensor's counter when it was listed
    piece    position of the tensor's piece, or of the piece of which the tensor is an alias
    """

    def __init__(
        self, tensors: Sequence[object], owners: Sequence[object], address: NDArray[np.uint64],
        counted: NDArray[np.int64], piece: NDArray[np.int64],
    ) -> None:
        self.tensors, self.owners, self.address, self.piece = tensors, owners, address, piece
        self._counted = counted
        self._rows: NDArray[np.int64] | None = None

    @classmethod
    def empty(cls) -> VersionCounters:
        """Counters of no tensors."""
        return cls((), (), np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def watch(self, late: NDArray[np.bool_]) -> None:
        """From now on, compare only the counters of tensors whose pieces are captured late. A second call changes
        nothing.
        """
        if self._rows is None:
            self._rows = np.flatnonzero(late[self.piece])

    def changed_rows(self) -> NDArray[np.int64]:
        """Positions of the tensors that were changed in place since their counters were read."""
        assert self._rows is not None, "the watch has begun"
        now = FRAMEWORK.versions_of([self.tensors[row] for row in self._rows.tolist()])
        moved: NDArray[np.int64] = self._rows[now != self._counted[self._rows]]
        return moved


class VersionCheck:
    """Checks by version counters whether tensors changed before a save had captured them. Can be used on any
    thread.
    """

    def __init__(
        self, counters: VersionCounters, layout: Layout, late: NDArray[np.bool_], guarded: Sequence[bool]
    ) -> None:
        """`late`: for each piece, whether it is captured after `save` has returned. `guarded`: for each piece, whether
        a change before its capture is an error.
        """
        self._lock = threading.Lock()
        self._counters: VersionCounters | None = counters
        self._layout, self._late, self._guarded = layout, late, guarded
        self._changed: tuple[str, ...] = ()

    def settle(self) -> None:
        """Compare, and drop the references to the tensors: later changes do not count. A second call does nothing."""
        with self._lock:
            if self._counters is not None:
                pieces = sorted(set(self._changes(self._counters)))
                self._changed = tuple(map(self._layout.pieces.names.__getitem__, pieces))
                self._counters = None

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of the tensors that have changed. Calls `settle`, so later changes are not reported."""
        self.settle()
        return self._changed

    def _changes(self, counters: VersionCounters) -> Iterator[int]:
        """Positions of pieces that have probably changed.

        All views of a storage share its counter. A storage may be much larger than its guarded pieces, such as a pool,
        or a buffer with parameters and gradients. If most of a storage is not guarded, the write was probably in that
        part, and the piece does not count as changed.
        """
        rows = [row for row in counters.changed_rows().tolist() if self._late[counters.piece[row]]]
        if not rows:
            return
        guarded = np.array([piece.bytes for piece in self._layout.pieces], np.int64) * np.array(self._guarded, np.bool_)
        for row in rows:
            owner, address, piece = counters.owners[row], int(counters.address[row]), int(counters.piece[row])
            begin, held = FRAMEWORK.extent_of(owner) or (address, 0)
            if begin <= address < begin + held:  # else the tensor has other memory than when its counter was read
                inside = (counters.address >= np.uint64(begin)) & (counters.address < np.uint64(begin + held))
                if 2 * int(guarded[distinct(counters.piece[inside])].sum()) <= held:
                    continue
            yield piece
