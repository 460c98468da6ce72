"""Streams of tensors: every byte, in the order on disk, within a few windows of memory."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

import flowstone as fs
from memory_taken import return_freed_memory, tried
from own_process import run_in_own_process


@pytest.fixture
def saved(tmp_path: Path) -> tuple[fs.Checkpoint, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    tensors = {f"w{n}": torch.randn(64, 16 * (n + 1)).to(torch.bfloat16 if n % 2 else torch.float32) for n in range(9)}
    tensors |= {"flag": torch.tensor(True), "none": torch.zeros(0, 3), "big": torch.randn(700, 700)}
    tensors["tied"] = tensors["w1"]
    with fs.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"model": tensors, "other": torch.ones(3)})
    return fs.open(tmp_path / "run"), {f"model.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("window_bytes", [1, 10_000, 1 << 28])
def test_every_tensor_comes_once_and_is_what_was_saved(
    saved: tuple[fs.Checkpoint, dict[str, torch.Tensor]], window_bytes: int
) -> None:
    checkpoint, tensors = saved
    actual = dict(checkpoint.stream(window_bytes=window_bytes))  # all of them kept, until the end
    assert set(actual) == {*tensors, "other"} - {"model.tied"}
    for name, tensor in actual.items():
        assert torch.equal(tensor, tensors.get(name, torch.ones(3))), name
        assert tensor.dtype == tensors.get(name, torch.ones(3)).dtype


def test_tensors_come_in_the_order_of_the_disk(saved: tuple[fs.Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, _ = saved
    index = checkpoint.index
    first = index.pieces_of
    places = [
        (int(index.chunks.segment[first(row).start]), int(index.chunks.offset[first(row).start]))
        for row in (checkpoint.index.rows()[name] for name, _ in checkpoint.stream(window_bytes=5000))
    ]
    assert places == sorted(places)


def test_only_what_is_named_comes_and_only_the_parts_that_are_asked_for(
    saved: tuple[fs.Checkpoint, dict[str, torch.Tensor]],
) -> None:
    checkpoint, tensors = saved
    assert {name for name, _ in checkpoint.stream("model.w*")} == {f"model.w{n}" for n in range(9)}
    halves = {"model.w3": slice(0, 32), "model.big": fs.Box((0, 350), (700, 350)), "model.w5": (5, slice(2, 9))}
    result = dict(checkpoint.stream(["model.w3", "model.big", "model.w5", "model.w4"], regions=halves))
    assert torch.equal(result["model.w3"], tensors["model.w3"][:32])
    assert torch.equal(result["model.big"], tensors["model.big"][:, 350:])
    assert torch.equal(result["model.w5"], tensors["model.w5"][5, 2:9])
    assert torch.equal(result["model.w4"], tensors["model.w4"])


def test_wrong_calls_are_refused_before_anything_is_read(saved: tuple[fs.Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, _ = saved
    with pytest.raises(fs.NoTensorError, match=r"model\.w77"):
        checkpoint.stream(["model.w77"])
    with pytest.raises(fs.NoTensorError, match="nothing"):
        checkpoint.stream("nothing.*")
    with pytest.raises(fs.ArgumentError, match="but `names` does not"):
        checkpoint.stream(["model.w3"], regions={"model.w4": slice(0, 1)})
    with pytest.raises(fs.ArgumentError, match=r"model\.w3"):
        checkpoint.stream(["model.w3"], regions={"model.w3": slice(0, 64, 2)})
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(fs.ArgumentError, match="window_bytes"):
            checkpoint.stream(window_bytes=wrong)  # type: ignore[arg-type]


def test_damage_is_raised_where_it_lies_and_not_before(saved: tuple[fs.Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, tensors = saved
    segment = next(Path(checkpoint.path).glob("rank-*"))
    data = bytearray(segment.read_bytes())
    data[data.index(tensors["model.big"].numpy().tobytes()) + 100] ^= 1
    segment.write_bytes(data)
    came: list[str] = []
    with pytest.raises(fs.DamagedError, match=r"model\.big"):
        came.extend(name for name, _ in fs.open(checkpoint.path).stream(window_bytes=1))
    assert "model.big" not in came


def test_memory_is_used_again_once_tensors_are_gone_and_never_before(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"model": {f"w{n}": torch.full((1000,), float(n)) for n in range(40)}})
    checkpoint = fs.open(tmp_path / "run")
    bases = {tensor.untyped_storage().data_ptr() for _, tensor in checkpoint.stream(window_bytes=4096)}
    assert len(bases) <= 4, "windows take turns"
    kept, checked = [], 0
    for name, tensor in checkpoint.stream(window_bytes=4096):
        if int(name[len("model.w"):]) % 3 == 0:
            kept.append((float(name[len("model.w"):]), tensor[:10]))  # a view is enough to keep it
        for value, own in kept:
            assert (own == value).all()
            checked += 1
    assert checked > 100


def test_a_stream_that_is_left_ends_its_thread(saved: tuple[fs.Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, _ = saved
    stream = checkpoint.stream(window_bytes=100)
    next(stream)
    assert [t for t in threading.enumerate() if t.name.startswith("flowstone-stream")]
    del stream
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("flowstone-stream")]


def _streamed(path: Path) -> tuple[int, int]:
    """The bytes that were streamed, and the memory that it took."""
    return_freed_memory()
    checkpoint = fs.open(path)
    next(iter(checkpoint.stream(["model.w0"])))
    totals: list[int] = []
    outcome, taken = tried(lambda: totals.append(sum(t.nbytes for _, t in checkpoint.stream(window_bytes=8 << 20))))
    assert outcome == "done"
    return totals[0], taken


def test_memory_stays_at_a_few_windows(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"model": {f"w{n}": torch.ones(1 << 20) for n in range(100)}})
    total, grown = run_in_own_process(_streamed, tmp_path / "run")
    assert total == 400 << 20
    assert grown < 64 << 20, "four windows of 8 MiB, and what reads them"
