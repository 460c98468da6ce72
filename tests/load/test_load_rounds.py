"""Loads through bounce buffers take a bounded amount of memory: casts are done in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import flowstone as fs
from flowstone.stage import bounce
from flowstone.table.pieces import Places

MIB = 1 << 20


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {
        "a": (300, 700), "b": (5, 400_000), "c": (1, 1, 500_000), "d": (), "e": (0, 3), "f": (70, 11), "g": (2, 3, 9),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of buffers, and of what they are converted to, in each round."""
    monkeypatch.setattr(bounce, "BOUNCE_BYTES", MIB)
    own, collected = bounce.ReadDestinations._buffers, list[int]()

    def noted(self: bounce.ReadDestinations, bounced: Sequence[int]) -> tuple[Places, object]:
        made = own(self, bounced)
        collected.append(sum(one.buffer.nbytes + one.buffer.numel() * one.dtype.item_bytes for one in made[1].values()))
        return made

    monkeypatch.setattr(bounce.ReadDestinations, "_buffers", noted)
    return collected


def test_what_is_cast_takes_no_more_memory_than_a_round(store: Path, seen: list[int]) -> None:
    saved = state()
    into = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in saved.items()}
    into["a"] = torch.zeros(700, 300, dtype=torch.float64).t()  # strided, and cast
    into["f"] = torch.zeros(70, 11)  # straight
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, saved).committed.result()
        report = checkpointer.load(into, rules=[fs.Cast("*")])
    assert report.matched == tuple(saved)
    assert report.cast
    assert len(seen) > 20
    assert max(seen) <= MIB
    for name, tensor in saved.items():
        assert torch.equal(into[name], tensor.to(into[name].dtype)), name


def test_damage_in_a_late_round_names_what_earlier_ones_have_written(store: Path, seen: list[int]) -> None:
    saved = {name: torch.randn(400, 300) for name in ("a", "b", "c", "d")}
    into = {name: torch.zeros(400, 300, dtype=torch.float64) for name in saved}
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, saved).committed.result()
        (segment,) = store.glob("step-*/rank-*.safetensors")
        whole = segment.read_bytes()
        data = bytearray(whole)
        data[data.index(saved["c"].numpy().tobytes()[:64])] ^= 1
        segment.write_bytes(data)
        with pytest.raises(fs.DamagedError) as caught:
            checkpointer.load(into, rules=[fs.Cast("*")])
        assert caught.value.written == ("a", "b")
        for name, tensor in into.items():
            assert torch.equal(tensor, saved[name].double() if name in ("a", "b") else torch.zeros(400, 300).double())
        with pytest.raises(fs.DamagedError):
            checkpointer.save(2, into)
        segment.write_bytes(whole)
        with pytest.raises(fs.DamagedError):
            checkpointer.save(2, into)  # a whole checkpoint does not mend what is in memory
        checkpointer.load(into, rules=[fs.Cast("*")])
        assert all(torch.equal(into[name], saved[name].double()) for name in saved)
        checkpointer.save(2, into).committed.result()


def test_verify_first_changes_nothing_before_all_is_read(store: Path, seen: list[int]) -> None:
    saved = {name: torch.randn(400, 300) for name in ("a", "b", "c")}
    into = {name: torch.zeros(400, 300, dtype=torch.float64) for name in saved}
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, saved).committed.result()
        checkpointer.load(into, rules=[fs.Cast("*")], verify_first=True)
    assert len(seen) == 1
    assert all(torch.equal(into[name], saved[name].double()) for name in saved)
