"""Version counters: torch counts the in-place operations on a tensor; all views of a tensor share the count.

A counter that moved between `save` and the end of the capture shows a change that escaped the fence, even of a single
element. A counter that did not move proves nothing: fused kernels, `.data` and numpy do not move it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone.state.tensors import versions_of
from flowstone.table.chunks import distinct
from flowstone.table.pieces import Layout


class Counters:
    """The version counters of a state's tensors, read when it was described. Columns, one row for each tensor.

    tensors  every tensor in the state; kept alive, so that the same objects are read again
    owners   the storage of each at that time, and `address` its address
    counted  the counter of each at that time
    piece    position of the piece that each tensor is, or is an alias of
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[object], address: NDArray[np.uint64],
        counted: NDArray[np.int64], piece: NDArray[np.int64],
    ) -> None:
        self.tensors, self.owners, self.address, self.piece = tensors, owners, address, piece
        self._counted = counted
        self._rows: NDArray[np.int64] | None = None

    @classmethod
    def none(cls) -> Counters:
        """Counters of no tensors."""
        return cls((), (), np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def begin(self, late: NDArray[np.bool_]) -> None:
        """Watch the pieces that are captured late. A second call changes nothing."""
        if self._rows is None:
            self._rows = np.flatnonzero(late[self.piece])

    def moved(self) -> NDArray[np.int64]:
        """Rows of tensors that have been changed in place since."""
        assert self._rows is not None, "what has not begun has not moved"
        now = versions_of([self.tensors[row] for row in self._rows.tolist()])
        moved: NDArray[np.int64] = self._rows[now != self._counted[self._rows]]
        return moved


class CounterCheck:
    """Whether a save's sources changed before they were captured, according to version counters. Any thread may call.
    """

    def __init__(self, counters: Counters, layout: Layout, late: NDArray[np.bool_], guarded: Sequence[bool]) -> None:
        """`late`: pieces captured after `save` has returned; `guarded`: those of them that must not change until then.
        """
        self._lock = threading.Lock()
        self._counters: Counters | None = counters
        self._layout, self._late, self._guarded = layout, late, guarded
        self._changed: tuple[str, ...] = ()

    def changed(self) -> tuple[str, ...]:
        """The names of changed tensors. The first call compares, and then drops the references to the tensors."""
        with self._lock:
            if self._counters is not None:
                found = sorted(set(self._changes(self._counters)))
                self._changed = tuple(map(self._layout.pieces.names.__getitem__, found))
                self._counters = None
            return self._changed

    def _changes(self, counters: Counters) -> Iterator[int]:
        """Positions of changed pieces.

        All views of a storage share its counters' moves. If most of a storage is not guarded (a corner of a pool;
        parameters and gradients in one buffer), the write was probably there, and says nothing about the piece.
        """
        rows = [row for row in counters.moved().tolist() if self._late[counters.piece[row]]]
        if not rows:
            return
        guarded = np.array([piece.bytes for piece in self._layout.pieces], np.int64) * np.array(self._guarded, np.bool_)
        for row in rows:
            owner, address, piece = counters.owners[row], int(counters.address[row]), int(counters.piece[row])
            held = owner.nbytes() if isinstance(owner, torch.UntypedStorage) else 0
            begin = owner.data_ptr() if isinstance(owner, torch.UntypedStorage) else address
            if begin <= address < begin + held:  # else the tensor has other memory now
                inside = (counters.address >= np.uint64(begin)) & (counters.address < np.uint64(begin + held))
                if 2 * int(guarded[distinct(counters.piece[inside])].sum()) <= held:
                    continue
            yield piece
