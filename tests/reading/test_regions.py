"""The regions that `read` accepts: those of numpy that are one run in every dimension."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flowstone as fs
from flowstone.reading.regions import to_box

TENSOR = torch.arange(60.0).reshape(3, 4, 5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> fs.Checkpoint:
    store = tmp_path_factory.mktemp("regions") / "run"
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": TENSOR, "scalar": torch.tensor(3.0)})
    return fs.open(store)


@pytest.mark.parametrize(
    "index",
    [
        slice(0, 2), np.s_[0:2, 1:3], np.s_[0:2, ...], 1, -1, ..., np.s_[..., 2], np.s_[-2:], np.s_[0:9], np.s_[2:1],
        np.s_[1, 2, 3], np.s_[:, np.int64(2)], np.s_[torch.tensor(1)], np.s_[::1], (), np.s_[1, ..., 1],
    ],
    ids=str,
)
def test_an_index_reads_what_numpy_would_give(checkpoint: fs.Checkpoint, index: object) -> None:
    expected = TENSOR.numpy()[index if not isinstance(index, torch.Tensor) else int(index)]  # type: ignore[index]
    for framework in ("torch", "numpy"):
        actual = np.asarray(checkpoint.read("x", index, framework=framework))  # type: ignore[call-overload]
        assert actual.shape == np.shape(expected)
        assert np.array_equal(actual, expected)


def test_a_scalar_is_read_by_no_index(checkpoint: fs.Checkpoint) -> None:
    for index in (None, (), ...):
        assert checkpoint.read("scalar", index).item() == 3.0
    with pytest.raises(fs.ArgumentError, match="1 indices for 'scalar'"):
        checkpoint.read("scalar", 0)


@pytest.mark.parametrize(
    "index",
    [
        np.s_[::2], np.s_[::-1], [0, 1], torch.ones(3).bool(), True, np.s_[None, 0], "x", 1.0, np.s_[0, 0, 0, 0], 3, -4,
        np.s_[..., ...], ((0, 0, 0), (1, 1, 1)), slice("a", "b"), fs.Box((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        fs.Box((0,), (1,)), fs.Box((0, 0, 3), (1, 1, 3)),
    ],
    ids=str,
)
def test_what_is_no_run_is_refused_with_what_is(checkpoint: fs.Checkpoint, index: object) -> None:
    with pytest.raises(fs.ArgumentError) as caught:
        checkpoint.read("x", index)  # type: ignore[call-overload]
    assert "next" in caught.value.facts


PARTS = st.one_of(st.slices(6), st.integers(-6, 6), st.just(...))


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.lists(PARTS, max_size=5).map(tuple))
def test_any_index_is_numpys_or_refused(shape: tuple[int, ...], index: tuple[object, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape)
    try:
        expected = array[index]
    except IndexError:
        expected = None
    try:
        box, result = to_box(index, shape, "x")
    except fs.ArgumentError:
        steps = [part for part in index if isinstance(part, slice) and part.step not in (None, 1)]
        assert expected is None or steps
        return
    assert expected is not None
    assert box.inside(shape)
    region = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
    assert np.array_equal(array[region].reshape(result), expected)
    assert result == np.shape(expected)
