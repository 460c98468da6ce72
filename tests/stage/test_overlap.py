"""Tensors of a state that share a part of their memory: loaded if the stored values agree, refused before otherwise."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowstone as fs
from flowstone.stage import overlap, shared_memory
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Memory, Piece, Pieces, Places
from forge import content

BASE = np.zeros(4096, np.float32)
REFUSED = "overlap     second: shares memory with first, but their stored values differ"


def saved(store: Path, **tensors: torch.Tensor) -> fs.Checkpointer:
    """A store with these, as tensors of their own."""
    checkpointer = fs.Checkpointer(store)
    checkpointer.save(1, {name: tensor.clone() for name, tensor in tensors.items()}).committed.result()
    return checkpointer


def test_tensors_that_share_some_memory_are_refused_before_a_byte_changes_and_both_are_named(store: Path) -> None:
    memory = torch.zeros(15)
    blank = {"first": memory[:10], "second": memory[5:], "alone": torch.zeros(3)}
    before = content(blank)
    with saved(store, first=torch.ones(10), second=torch.full((10,), 2.0), alone=torch.ones(3)) as checkpointer:
        with pytest.raises(fs.MismatchError) as caught:
            checkpointer.load(blank)
        assert caught.value.differences == (REFUSED,)
        assert "nothing was changed" in caught.value.message
        assert content(blank) == before
        checkpointer.save(2, blank)  # nothing was changed, so nothing forbids it


def test_what_a_load_would_refuse_as_overlapping_is_in_its_explanation(store: Path) -> None:
    memory = torch.zeros(15)
    with saved(store, first=torch.ones(10), second=torch.zeros(10)):
        pass
    explanation = fs.explain(fs.open(store), {"first": memory[:10], "second": memory[5:]})
    assert explanation.differences == (REFUSED,)


def test_columns_of_one_matrix_interleave_and_are_loaded(store: Path) -> None:
    fused = torch.zeros(6, 9)
    blank = {"q": fused[:, 0:3], "k": fused[:, 3:6], "v": fused[:, 6:9]}
    expected = torch.arange(54.0).reshape(6, 9)
    with saved(store, q=expected[:, 0:3], k=expected[:, 3:6], v=expected[:, 6:9]) as checkpointer:
        checkpointer.load(blank)
    assert torch.equal(fused, expected)


def test_columns_that_share_one_column_are_refused(store: Path) -> None:
    fused = torch.zeros(6, 9)
    checkpointer = saved(store, q=torch.ones(6, 4), k=torch.zeros(6, 4))
    with checkpointer, pytest.raises(fs.MismatchError, match="k: shares memory with q"):
        checkpointer.load({"q": fused[:, 0:4], "k": fused[:, 3:7]})


@pytest.mark.parametrize(("other", "loads"), [(1.0, True), (2.0, False)])
def test_one_memory_in_two_shapes_is_loaded_where_both_are_stored_with_the_same_bytes(
    store: Path, other: float, loads: bool
) -> None:
    memory = torch.zeros(12)
    blank = {"matrix": memory.view(3, 4), "flat": memory}
    with saved(store, matrix=torch.ones(3, 4), flat=torch.full((12,), other)) as checkpointer:
        if loads:
            checkpointer.load(blank)
            assert memory.tolist() == [1.0] * 12
        else:
            with pytest.raises(fs.MismatchError, match="shares memory"):
                checkpointer.load(blank)


def test_tied_weights_load_as_before(store: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight  # type: ignore[union-attr]
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": model}).committed.result()
        checkpointer.load({"model": model})


def _places(memory: list[Memory]) -> tuple[Pieces, Places]:
    pieces = [Piece(f"t{i}", DTYPES["float32"], m.shape, fs.Box.whole(m.shape)) for i, m in enumerate(memory)]
    return Pieces.of(pieces), Places.of(memory)


class _Stored:
    """As much of an index as is looked at. No two tensors are stored alike."""

    def __init__(self, pieces: Pieces) -> None:
        self.tensors = pieces.tensors

    def same_bytes(self, entry: int, other: int) -> bool:
        return entry == other


def _found(memory: list[Memory]) -> list[list[int]]:
    pieces, places = _places(memory)
    targets = overlap.LoadTargets(pieces, places, _Stored(pieces), range(len(pieces)))  # type: ignore[arg-type]
    return shared_memory.find_sharing_groups(targets, overlap.find_overlap_groups(targets))


def _memory(array: np.ndarray, device: str = "cpu") -> Memory:
    return Memory(BASE, array.ctypes.data, array.shape, array.strides, array.itemsize, device)


@st.composite
def _views(draw: st.DrawFn) -> np.ndarray:
    """A view of BASE that does not overlap itself: of rows and columns, with steps, forwards."""
    width = draw(st.integers(1, 9))
    rows = BASE[draw(st.integers(0, 40)) :][: width * draw(st.integers(1, 6))]
    matrix = rows[: len(rows) // width * width].reshape(-1, width)
    step = draw(st.integers(1, 3))
    begin = draw(st.integers(0, width - 1))
    view = matrix[:: draw(st.integers(1, 2)), begin : begin + draw(st.integers(1, width)) : step]
    return view.T if draw(st.booleans()) else view


@settings(max_examples=150, deadline=None)
@given(st.lists(_views(), min_size=1, max_size=6), st.booleans())
def test_overlaps_are_those_that_numpy_finds_two_by_two(views: list[np.ndarray], marked: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if marked:
            patch.setattr(shared_memory, "_PAIRS_MAX", -1)
        actual = _found([_memory(view) for view in views])
    pairs = [
        (i, other) for i in range(len(views)) for other in range(i) if np.shares_memory(views[i], views[other])
    ]
    groups = {position: number for number, group in enumerate(actual) for position in group}
    assert all(groups[index] == groups[other] for index, other in pairs)
    assert {groups[index] for index, _ in pairs} == set(range(len(actual))), "no group without a pair"


def test_the_same_addresses_on_two_devices_are_not_the_same_memory() -> None:
    entry = BASE[:10]
    assert _found([_memory(entry), _memory(entry, "cuda:0"), _memory(entry, "cuda:1")]) == []
    assert _found([_memory(entry, "cuda:0"), _memory(BASE[5:15], "cuda:0")]) == [[0, 1]]


def test_ten_thousand_columns_that_interleave_are_told_apart_at_once() -> None:
    matrix = np.zeros((8, 10_000), np.float32)
    columns = [_memory(matrix[:, index]) for index in range(10_000)]
    started = time.process_time()
    assert _found(columns) == []
    assert _found([*columns, _memory(matrix[3, 500:501])]) == [[*range(10_001)]]
    assert time.process_time() - started < 5


def test_fifty_thousand_tensors_cost_milliseconds() -> None:
    memory = [Memory(BASE, 4096 * index, (1024,), (4,), 4) for index in range(50_000)]
    pieces, places = _places(memory)
    targets = overlap.LoadTargets(pieces, places, _Stored(pieces), range(len(pieces)))  # type: ignore[arg-type]
    spent = []
    for _ in range(3):
        started = time.process_time()
        assert overlap.find_overlap_groups(targets) == []
        spent.append(time.process_time() - started)
    assert min(spent) < 0.1, "of 130 ms that describing them takes"
