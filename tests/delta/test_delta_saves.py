"""Saves that write only the chunks that the previous checkpoint does not have."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

import flowstone as fs
from flowstone.config import MIB
from flowstone.errors import DamagedError
from flowstone.events.phases import Committed, Event
from flowstone.store.local import LocalStore
from flowstone.store.memory import MemoryStore
from flowstone.store.system import System
from forge import content, flip
from lora_job import BASE_BYTES, SMALL_BYTES, Job, disk_bytes, fresh_load


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "run")
    yield job
    job.checkpointer.close()


def test_a_frozen_base_is_written_once(job: Job, tmp_path: Path) -> None:
    expected = {}
    for step in range(1, 9):
        checkpoint = job.save(step)
        expected[step] = content(job.state)
        assert checkpoint.verify().sound
    first, *later = job.written
    assert first > BASE_BYTES
    assert max(later) < SMALL_BYTES
    assert disk_bytes(tmp_path) < BASE_BYTES + 8 * SMALL_BYTES
    for step, state in expected.items():
        assert content(fresh_load(tmp_path / "run", step)) == state


def test_the_bytes_live_until_the_last_step_that_uses_them_is_removed(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", keep=fs.Keep(last=1))
    for step in range(1, 6):
        job.save(step)
    job.checkpointer.close()
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000005"]
    assert max(job.written[1:]) < SMALL_BYTES
    shutil.copytree(tmp_path / "run/step-00000005", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    assert fs.open(tmp_path / "copy").verify().sound


def test_of_a_tensor_that_changes_in_part_only_the_changed_chunks_are_written(job: Job, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        job.save(step)
    with torch.no_grad():
        job.model["base"][1].weight[0, 0] += 1
    checkpoint = job.save(4)
    assert checkpoint.verify().sound
    assert MIB < job.written[-1] < MIB + SMALL_BYTES
    assert content(fresh_load(tmp_path / "run", 4)) == content(job.state)
    job.save(5)
    assert job.written[-1] < SMALL_BYTES
    assert content(fresh_load(tmp_path / "run", 5)) == content(job.state)


def test_what_no_longer_rests_is_written_as_tensors_again(job: Job, tmp_path: Path) -> None:
    for step in range(1, 7):
        if step > 3:
            with torch.no_grad():
                for layer in job.model["base"]:
                    layer.weight.add_(1)
        job.save(step)
    assert [size > BASE_BYTES for size in job.written] == [True, False, False, True, True, True]
    names = [path.name for path in sorted((tmp_path / "run/step-00000006").glob("*rank-*"))]
    assert names == ["rank-00000.safetensors"]
    assert fs.open(tmp_path / "run", 6).manifest.critical == ()
    for step in (4, 5, 6):
        assert fs.open(tmp_path / "run", step).verify().sound
    assert content(fresh_load(tmp_path / "run", 6)) == content(job.state)


def test_dense_training_has_no_base(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        for step in range(1, 5):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            checkpoint = checkpointer.save(step, {"model": model, "optimizer": optimizer}).committed.result()
            assert checkpoint.manifest.critical == ()


def test_after_a_load_that_found_damage_the_next_save_does_not_refer_to_it(job: Job, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        job.save(step)
    whole = fresh_load(tmp_path / "run", 3)
    shared = next((tmp_path / "run/step-00000003").glob("from-*"))
    flip(shared, shared.stat().st_size // 2)
    with pytest.raises(DamagedError):
        job.checkpointer.load(job.state, step=3)
    with fs.Checkpointer(tmp_path / "copy") as other:
        other.save(9, whole)
    shutil.copytree(tmp_path / "copy/step-00000009", tmp_path / "run/step-00000009")
    job.checkpointer.load(job.state, step=9)
    assert job.save(10).verify().sound


class WithoutLinks(System):
    """A file system that refuses links. Knows how often it was asked."""

    def __init__(self, code: int) -> None:
        self.code, self.asked = code, 0

    def link(self, source: Path, target: Path, source_at: int | None = None, target_at: int | None = None) -> None:
        self.asked += 1
        raise OSError(self.code, "no links")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP])
def test_where_links_are_refused_saves_write_everything_and_ask_no_more(tmp_path: Path, code: int) -> None:
    system = WithoutLinks(code)
    job = Job(LocalStore(tmp_path / "run", system=system))
    for step in range(1, 6):
        assert job.save(step).verify().sound
        assert content(fresh_load(tmp_path / "run", step)) == content(job.state)
    job.checkpointer.close()
    assert system.asked == 1
    assert min(job.written) > BASE_BYTES
    assert fs.open(tmp_path / "run", 5).manifest.critical == ()


def test_a_base_that_was_removed_by_hand_is_missed_once(job: Job, tmp_path: Path) -> None:
    for step in (1, 2):
        job.save(step)
    shutil.rmtree(tmp_path / "run/step-00000002")
    assert job.save(3).verify().sound
    assert job.written[-1] > BASE_BYTES
    assert job.save(4).verify().sound
    assert job.written[-1] < SMALL_BYTES
    assert content(fresh_load(tmp_path / "run", 4)) == content(job.state)


def test_a_base_whose_step_is_another_checkpoint_by_now_is_not_taken_for_it(job: Job, tmp_path: Path) -> None:
    job.save(1)
    other = Job(tmp_path / "other")
    with torch.no_grad():
        other.model["base"][0].weight.add_(1)
    other.save(1)
    other.checkpointer.close()
    shutil.rmtree(tmp_path / "run/step-00000001")
    shutil.copytree(tmp_path / "other/step-00000001", tmp_path / "run/step-00000001")
    assert job.save(2).verify().sound
    assert job.written[-1] > BASE_BYTES
    assert content(fresh_load(tmp_path / "run", 2)) == content(job.state)


def test_another_fence_makes_no_tensor_rest(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    fences: tuple[Literal["auto", "manual"], ...] = ("auto", "manual", "auto")
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        for step, fence in enumerate(fences):
            with torch.no_grad():
                model.weight.normal_()
                model.bias.normal_()
            save = checkpointer.save(step, {"model": model}, fence=fence)
            if fence == "manual":
                checkpointer.fence()
            assert save.committed.result().manifest.critical == ()


def test_a_store_without_links_gets_whole_checkpoints() -> None:
    store = MemoryStore(atomic_rename=False)
    job = Job(store)
    for step in (1, 2, 3):
        assert job.save(step).manifest.critical == ()
    job.checkpointer.close()


def test_a_store_in_memory_links_too() -> None:
    store = MemoryStore()
    job = Job(store)
    for step in (1, 2, 3):
        assert job.save(step).verify().sound
    assert max(job.written[1:]) < SMALL_BYTES
    job.checkpointer.close()


def test_a_file_of_which_little_is_used_is_written_again_so_that_it_can_go(tmp_path: Path) -> None:
    """The first save has the frozen part, and five times as much that is trained."""
    torch.manual_seed(1)
    frozen = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
    model = nn.ModuleDict({"frozen": frozen, "trained": nn.Linear(1024, 8 * 1024, bias=False)})
    optimizer = torch.optim.SGD(model["trained"].parameters(), lr=0.1)
    events: list[Event] = []
    with fs.Checkpointer(tmp_path / "run", keep=fs.Keep(last=1), on_event=events.append) as checkpointer:
        for step in range(1, 6):
            model["trained"].weight.grad = torch.randn_like(model["trained"].weight)
            optimizer.step()
            checkpoint = checkpointer.save(step, {"model": model, "optimizer": optimizer}).committed.result()
            assert checkpoint.verify().sound
    written = [event.bytes // MIB for event in events if isinstance(event, Committed)]
    assert written == [36, 36, 32, 32, 32], "the second writes the frozen part again, apart from what is trained"
    assert disk_bytes(tmp_path) < 38 * MIB
    homes = [row.home for row in checkpoint.manifest.segments]
    assert homes.count(None) == 1
    assert len(homes) == 2
