"""A disk that fails while it is one path of several: its bytes go to the other one, or the save fails by name."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import nn

import flowstone as fs
from faulty_disk import FaultyDisk, Trouble
from flowstone.config import MIB, EngineOptions
from flowstone.store.local import LocalStore
from flowstone.store.striped.fallback_path import choose_fallback_path
from flowstone.store.striped.store import StripedStore

ENGINE = EngineOptions(request_bytes=2 * MIB, queue_depth=2)


def state(value: int) -> dict[str, object]:
    return {"weights": {str(index): torch.arange(3 * MIB // 8) + value + index for index in range(6)}, "step": value}


def is_loaded(store: Path, step: int) -> bool:
    into = state(0)
    with fs.Checkpointer(store, engine=ENGINE) as checkpointer:
        checkpointer.load(into, step=step)
    expected = state(step)["weights"]
    assert isinstance(expected, dict)
    weights = into["weights"]
    assert isinstance(weights, dict)
    return all(torch.equal(weights[row], expected[row]) for row in expected) and fs.open(store, step).verify().sound


def moved(store: Path, step: int) -> list[str]:
    return [path.name for path in (store / f"step-{step:08d}").glob("*-path1*")]


@pytest.mark.parametrize("trouble", [
    Trouble("write", errno.EIO, name="rank", spared=2), Trouble("write", errno.EIO, name="rank"),
    Trouble("write", errno.ENOSPC, name="rank", spared=3), Trouble("fsync", errno.EIO, name="rank"),
    Trouble("fallocate", errno.ENOSPC, name="rank"),
], ids=lambda trouble: f"{trouble.operation}-{trouble.spared}-{errno.errorcode[trouble.error]}")
def test_what_a_disk_refuses_under_way_is_on_the_first_path(
    disk: FaultyDisk, tmp_path: Path, trouble: Trouble
) -> None:
    first = tmp_path / "one"
    with fs.Checkpointer(fs.Striped([first, disk.path / "two"], engine=ENGINE), engine=ENGINE) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        disk.befall(trouble)
        checkpointer.save(2, state(2)).committed.result()
        assert moved(first, 2) == ["rank-00000.0001-path1.safetensors"]
        checkpointer.save(3, state(3)).committed.result()
    assert sum(disk.befall().values()) > 0
    assert not moved(first, 1)
    assert all(is_loaded(first, step) for step in (1, 2, 3))


def test_what_does_not_come_back_fails_that_save_and_no_later_one(disk: FaultyDisk, tmp_path: Path) -> None:
    first = tmp_path / "one"
    with fs.Checkpointer(fs.Striped([first, disk.path / "two"], engine=ENGINE), engine=ENGINE) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        disk.befall(
            Trouble("write", errno.EIO, name="rank", spared=3), Trouble("read", errno.EIO, name="rank")
        )
        with pytest.raises(fs.StorageError, match="path1"):
            checkpointer.save(2, state(2)).committed.result()
        checkpointer.save(3, state(3)).committed.result()
    disk.befall()
    assert [path.name for path in sorted(first.glob("step-*"))] == ["step-00000001", "step-00000003"]
    assert is_loaded(first, 1)
    assert is_loaded(first, 3)


def test_segments_without_room_move_while_training_goes_on(disk: FaultyDisk, tmp_path: Path) -> None:
    """Space is reserved on another thread, while the state is captured into the arena."""
    model = nn.Sequential(*(nn.Linear(700, 700, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    first = tmp_path / "one"
    with fs.Checkpointer(fs.Striped([first, disk.path / "two"], engine=ENGINE), engine=ENGINE) as checkpointer:
        for step in range(1, 5):
            model(torch.ones(2, 700)).sum().backward()
            optimizer.step()
            if step == 3:
                disk.befall(Trouble("fallocate", errno.ENOSPC, name="rank"))
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            save = checkpointer.save(step, {"model": model, "optimizer": optimizer})
            if step == 3:
                save.committed.result()
                assert disk.befall()["fallocate"] > 0
                kept = expected
    assert moved(first, 3) == ["rank-00000.0001-path1.safetensors"]
    with fs.Checkpointer(first) as checkpointer:
        checkpointer.load({"model": model}, step=3)
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("trouble", [
    Trouble("write", errno.EIO, name="rank", spared=2), Trouble("fsync", errno.EIO, name="rank"),
    Trouble("fallocate", errno.ENOSPC, name="rank"),
], ids=lambda trouble: f"{trouble.operation}-{errno.errorcode[trouble.error]}")
def test_of_three_paths_what_one_refuses_goes_to_the_others_by_weight(
    disk: FaultyDisk, tmp_path: Path, trouble: Trouble
) -> None:
    first, third = tmp_path / "one", tmp_path / "three"

    def there(step: int) -> set[str]:
        """For which paths the third one has segments."""
        return {path.stem.rpartition("-")[2] for path in third.glob(f"segments-{step:08d}-*/*")}

    store = fs.Striped([first, disk.path / "two", third], weights=[0, 1, 1], engine=ENGINE)
    with fs.Checkpointer(store, engine=ENGINE, keep=2) as checkpointer:
        checkpointer.save(1, {**state(2), "step": 1}).committed.result()
        assert there(1) == {"path2"}
        disk.befall(trouble)
        checkpointer.save(2, state(2)).committed.result()
        assert sum(disk.befall().values()) > 0
        assert not moved(first, 2), "its weight is 0"
        assert there(2) == {"path1", "path2"}
        assert is_loaded(first, 2)
        checkpointer.save(3, {**state(2), "step": 3}).committed.result()  # it links what stayed equal, where it is
        assert there(3) == {"path1", "path2"}
        checkpointer.save(4, state(4)).committed.result()
        checkpointer._saves.sole_writer.drain()
        assert not there(1)
        assert not there(2), "retention removes it there, too"
    assert fs.open(first, step=3).verify().sound
    assert is_loaded(first, 4)


def test_segments_of_several_ranks_come_to_all_other_paths(tmp_path: Path) -> None:
    """Which one is drawn by a segment's name: as often as its path's weight says."""
    paths = [LocalStore(tmp_path / name) for name in ("one", "two", "three", "four")]
    store = StripedStore(paths, [1.0, 0.0, 3.0, 4.0])
    actual = [
        choose_fallback_path(store, f"step-00000001/rank-{rank:05d}.0001-path1.safetensors", 1) for rank in range(800)
    ]
    for number, expected in ((0, 100), (1, 0), (2, 300), (3, 400)):
        assert abs(actual.count(number) - expected) < 60, (number, actual.count(number))
