"""Tensor sizes: those of the paper's own logs, and their scaled forms."""

from __future__ import annotations

import pytest

from flowstone.config import BLOCK_BYTES, GIB, MIB
from flowstone_study.mixes import MODELS, TINY_BELOW_BYTES, model_tensor_bytes, tensor_bytes
from flowstone_study.records import MIXES, Cell, MixName

FILE_HEADER_BYTES_MAX = 32 * 1024  # a pickled skeleton around the tensors of a file


@pytest.mark.parametrize(
    ("mix", "layer_file", "optimizer_file"),
    [("3B", 50_344_360, 9_392_110_303), ("7B", 109_068_712, 11_093_416_609)],
)
def test_models_are_those_of_the_logs(mix: MixName, layer_file: int, optimizer_file: int) -> None:
    sizes = model_tensor_bytes(MODELS[mix])
    assert 0 <= layer_file - sum(sizes[1:7]) < FILE_HEADER_BYTES_MAX
    assert 0 <= optimizer_file - sum(sizes[-6:]) < FILE_HEADER_BYTES_MAX


def test_model_of_13b_has_the_reported_layer_size() -> None:
    assert -(-sum(model_tensor_bytes(MODELS["13B"])[1:7]) // MIB) == 152  # as `ls -h` rounds


def test_3b_on_four_ranks_is_as_large_as_reported() -> None:
    assert 4 * sum(model_tensor_bytes(MODELS["3B"])) / GIB == pytest.approx(41, abs=0.5)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("size", "processes"), [(8 * MIB, 4), (128 * MIB, 1), (GIB, 4), (40 * GIB, 4)])
def test_scaled_mixes_have_the_size_asked_for(mix: MixName, size: int, processes: int) -> None:
    sizes = tensor_bytes(Cell(direction="write", mix=mix, bytes=size, processes=processes))
    assert sum(sizes) * processes == pytest.approx(size, rel=0.005)
    assert all(size % BLOCK_BYTES == 0 or size < TINY_BELOW_BYTES for size in sizes)


@pytest.mark.parametrize("mix", list(MODELS))
def test_scaled_models_keep_the_optimizers_share_and_the_norms(mix: MixName) -> None:
    model = MODELS[mix]
    full, small = model_tensor_bytes(model), tensor_bytes(Cell(direction="write", mix=mix, bytes=256 * MIB))
    assert sum(small[-6:]) / sum(small) == pytest.approx(sum(full[-6:]) / sum(full), rel=0.05)
    assert 2 * model.hidden in small
    assert len(small) < len(full)


def test_synthetic_tensors_are_equal() -> None:
    assert set(tensor_bytes(Cell(direction="write", bytes=64 * MIB, processes=2))) == {4 * MIB}


def test_less_than_the_norms_of_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="are too few: the norms"):
        tensor_bytes(Cell(direction="write", mix="13B", bytes=32 * 1024))
