"""Stored values of memory that pieces share: compared byte by byte, for any views."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.errors import BudgetError
from flowstone.stage import shared_memory
from flowstone.stage.overlap import LoadTargets, find_overlap_groups
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Memory, Piece, Pieces, Places

BASE = np.zeros(512, np.float32)


class _Stored:
    """As much of an index as is looked at. No two tensors are known to be stored alike."""

    def __init__(self, pieces: Pieces) -> None:
        self.tensors = pieces.tensors

    def same_bytes(self, entry: int, other: int) -> bool:
        return entry == other


def conflicts(views: Sequence[np.ndarray], content: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Of views of BASE, for each of which `content` is stored."""
    memory = [Memory(BASE, view.ctypes.data, view.shape, view.strides, view.itemsize) for view in views]
    pieces = Pieces.of([
        Piece(f"t{i}", DTYPES[view.dtype.name], view.shape, Box.whole(view.shape)) for i, view in enumerate(views)
    ])

    def read(positions: Sequence[int], places: Places) -> None:
        for number, position in enumerate(positions):
            raw = np.ascontiguousarray(content[position]).view(np.uint8).reshape(-1)
            places.owners[number][...] = raw  # type: ignore[index]

    targets = LoadTargets(pieces, Places.of(memory), _Stored(pieces), range(len(pieces)))  # type: ignore[arg-type]
    return shared_memory.find_conflicts(
        targets, shared_memory.find_sharing_groups(targets, find_overlap_groups(targets)), read
    )


@st.composite
def _views(draw: st.DrawFn) -> np.ndarray:
    """A view of a part of BASE: a type, steps, an order of dimensions, expanded or overlapping itself."""
    part = BASE[draw(st.integers(0, 20)) :][:60].view(draw(st.sampled_from(["f4", "u1", "c8", "i2"])))
    kind = draw(st.sampled_from(["flat", "matrix", "window", "expanded"]))
    if kind == "flat":
        return part[draw(st.integers(0, 7)) :: draw(st.integers(1, 3))]
    if kind == "matrix":
        matrix = part[: len(part) // 6 * 6].reshape(6, -1)[:, draw(st.integers(0, 2)) :]
        return matrix.T if draw(st.booleans()) else matrix
    if kind == "window":
        return np.lib.stride_tricks.sliding_window_view(part, draw(st.integers(2, 5)))
    return np.broadcast_to(part[draw(st.integers(0, 9)) :][:4], (3, 4))


@settings(max_examples=300, deadline=None)
@given(st.lists(_views(), min_size=1, max_size=5), st.randoms(use_true_random=False), st.booleans())
def test_views_conflict_where_no_memory_could_hold_what_is_stored_for_all_of_them(
    views: list[np.ndarray], random: object, changes: bool
) -> None:
    rng = np.random.default_rng(random.randrange(1 << 32))  # type: ignore[attr-defined]
    BASE.view(np.uint8)[...] = rng.integers(0, 256, BASE.nbytes, np.uint8)  # not a number, too
    content = [view.copy() for view in views]
    if changes:
        entry = content[int(rng.integers(len(content)))].view(np.uint8).reshape(-1)
        entry[int(rng.integers(len(entry)))] ^= 1 << int(rng.integers(8))
    actual = conflicts(views, content)
    assert bool(actual) == (not _can_be_held(views, content))
    for index, other in actual:
        assert np.shares_memory(views[index], views[other])


def _can_be_held(views: Sequence[np.ndarray], content: Sequence[np.ndarray]) -> bool:
    """Byte for byte: whether each address has one value in all that is stored."""
    held: dict[int, int] = {}
    for view, values in zip(views, content, strict=True):
        for index in np.ndindex(view.shape):
            address = view.ctypes.data + sum(n * s for n, s in zip(index, view.strides, strict=True))
            for byte, value in enumerate(values[index].tobytes()):
                if held.setdefault(address + byte, value) != value:
                    return False
    return True


def test_what_there_is_no_memory_to_compare_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 100)
    views = [BASE[:100], BASE[50:150]]
    with pytest.raises(BudgetError, match="the stored values of tensors that share memory takes 750 bytes"):
        conflicts(views, [])


def test_pieces_are_read_in_rounds_that_fit_into_the_bounce_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "BOUNCE_BYTES", 100)
    BASE[...] = 0
    views = [BASE[:100], BASE[50:60], BASE[60:70], BASE[70:80]]
    assert conflicts(views, [view.copy() for view in views]) == []
    assert conflicts(views, [view.copy() + (index == 3) for index, view in enumerate(views)]) == [(3, 0)]
