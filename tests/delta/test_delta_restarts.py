"""First saves of a process, or after a load, that refer to checkpoints in the store."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flowstone as fs
from flowstone.commit.entries import step_directory
from flowstone.config import MIB
from flowstone.errors import DamagedError, LockedError
from forge import content, flip
from lora_job import BASE_BYTES, SMALL_BYTES, Job, disk_bytes, fresh_load

OWN = "rank-00000.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """With step 1, whole."""
    job = Job(tmp_path / "run")
    job.save(1)
    job.checkpointer.close()
    return tmp_path / "run"


@pytest.fixture
def job(store: Path) -> Iterator[Job]:
    """A later process."""
    job = Job(store)
    yield job
    job.checkpointer.close()


def is_whole(job: Job, step: int) -> bool:
    """Save; whether everything was written. Checks that the step is what was saved."""
    checkpoint = job.save(step)
    assert checkpoint.verify().sound
    store = Path(checkpoint.path).parent
    assert content(fresh_load(store, step)) == content(job.state)
    homes = {row.home for row in checkpoint.manifest.segments}
    assert (job.written[-1] < SMALL_BYTES) == (len(homes) > 1)
    return homes == {None}


def base_segment(store: Path, step: int = 1) -> Path:
    """The file that has the frozen base."""
    return max((store / step_directory(step)).glob("*rank-*"), key=lambda path: path.stat().st_size)


def test_a_job_that_restarts_each_day_writes_its_base_once(tmp_path: Path) -> None:
    for day in range(1, 7):
        job = Job(tmp_path / "run", keep=fs.Keep(last=2))
        if day > 1:
            job.checkpointer.load(job.state)
        assert is_whole(job, day) == (day == 1)
        job.checkpointer.close()
    assert disk_bytes(tmp_path) < BASE_BYTES + 2 * SMALL_BYTES
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000005", "step-00000006"]


def test_saves_after_the_first_refer_on(job: Job) -> None:
    job.checkpointer.load(job.state)
    assert not any(is_whole(job, step) for step in (2, 3, 4))


def test_a_process_that_loads_nothing_finds_its_base(job: Job) -> None:
    assert not is_whole(job, 2)


def test_what_differs_from_the_checkpoint_found_is_written(job: Job) -> None:
    with torch.no_grad():
        job.model["base"][0].weight[0, 0] += 1
    job.save(2)
    assert MIB < job.written[-1] < MIB + SMALL_BYTES
    assert content(fresh_load(Path(job.checkpointer.latest().path).parent, 2)) == content(job.state)


def test_another_checkpoint_of_the_same_names_is_no_base(job: Job) -> None:
    with torch.no_grad():
        for layer in job.model["base"]:
            layer.weight.add_(1)
    assert is_whole(job, 2)


def test_a_load_in_the_middle_refers_to_what_was_loaded(job: Job) -> None:
    for step in (2, 3):
        job.save(step)
    job.checkpointer.load(job.state, step=2)
    job.checkpointer.rewind(2)
    assert not is_whole(job, 3)


def test_after_a_rewind_the_step_that_was_loaded_is_the_base(store: Path) -> None:
    earlier = Job(store)
    for step in (2, 3):
        earlier.save(step)
    earlier.checkpointer.close()
    job = Job(store)
    job.checkpointer.load(job.state, step=1)
    job.checkpointer.rewind(1)
    shutil.rmtree(store / "step-00000001")  # what it was is in no other step
    assert is_whole(job, 2)
    assert not is_whole(job, 3)
    job.checkpointer.close()


def test_only_what_a_load_has_read_is_referred_to(store: Path, job: Job) -> None:
    flip(base_segment(store), base_segment(store).stat().st_size // 2)
    adapter = torch.nn.ModuleDict({"adapter": job.model["adapter"]})
    job.checkpointer.load({"model": adapter}, rules=[fs.Skip("model.base.*")])
    job.save(2)
    assert job.written[-1] > BASE_BYTES
    assert fs.open(store, 2).verify().sound


def test_what_a_load_has_found_damaged_is_not_referred_to(store: Path, job: Job) -> None:
    other = Job(store)
    with torch.no_grad():
        other.model["base"][0].weight.add_(1)  # whole again, and so another file
        other.model["base"][1].weight.add_(1)
        other.model["base"][2].weight.add_(1)
    other.save(2)
    other.checkpointer.close()
    segment = base_segment(store, 2)
    flip(segment, segment.stat().st_size // 2)
    assert job.checkpointer.load(job.state, fallback=True).step == 1
    assert not is_whole(job, 2)
    homes = {row.home for row in fs.open(store, 2).manifest.segments}
    assert homes == {None, fs.open(store, 1).manifest.id}


def test_after_a_load_that_failed_everything_is_written(store: Path, job: Job) -> None:
    segment = base_segment(store)
    flip(segment, segment.stat().st_size // 2)
    with pytest.raises(DamagedError):
        job.checkpointer.load(job.state, verify_first=True)
    job.save(2)
    assert job.written[-1] > BASE_BYTES
    assert fs.open(store, 2).verify().sound


@pytest.mark.parametrize("hides", [False, True])
def test_a_file_that_is_edited_after_the_load_is_not_referred_to(store: Path, job: Job, hides: bool) -> None:
    job.checkpointer.load(job.state)
    segment = base_segment(store)
    before = segment.stat()
    flip(segment, before.st_size // 2)
    if hides:  # a clock that was set back gives it its old time
        os.utime(segment, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert is_whole(job, 2)


def test_a_base_that_is_removed_after_the_load_is_missed_once(store: Path, job: Job) -> None:
    job.checkpointer.load(job.state)
    shutil.rmtree(store / "step-00000001")
    assert is_whole(job, 2)
    assert not is_whole(job, 3)


def test_a_base_that_is_replaced_after_the_load_is_not_taken_for_it(store: Path, job: Job, tmp_path: Path) -> None:
    job.checkpointer.load(job.state)
    other = Job(tmp_path / "other")
    with torch.no_grad():
        other.model["base"][0].weight.add_(1)
    other.save(1)
    other.checkpointer.close()
    shutil.rmtree(store / "step-00000001")
    shutil.copytree(tmp_path / "other/step-00000001", store / "step-00000001")
    assert is_whole(job, 2)


def test_another_job_may_have_removed_what_was_loaded(store: Path, job: Job) -> None:
    job.checkpointer.load(job.state)
    other = Job(store, keep=fs.Keep(last=1))
    other.save(2)
    with pytest.raises(LockedError):
        job.save(3)
    other.checkpointer.close()
    assert is_whole(job, 3)


def test_times_of_files_do_not_matter(store: Path, job: Job) -> None:
    for path in (store / "step-00000001").iterdir():
        os.utime(path, ns=(0, 10**18 * 4))
    job.checkpointer.load(job.state)
    assert not is_whole(job, 2)


def test_a_damaged_index_is_no_base(store: Path, job: Job) -> None:
    flip(store / "step-00000001/index.safetensors", 100)
    job.save(2)
    assert job.written[-1] > BASE_BYTES
    assert fs.open(store, 2).verify().sound


def test_dense_training_reads_no_index_and_stays_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        model = torch.nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(model.parameters())
        with fs.Checkpointer(tmp_path / "run") as checkpointer:
            if step == 3:
                checkpointer.load({"model": model, "optimizer": optimizer})
            checkpoint = checkpointer.save(step, {"model": model, "optimizer": optimizer}).committed.result()
            assert checkpoint.manifest.critical == ()
        if step == 1:
            flip(tmp_path / "run/step-00000001/index.safetensors", 100)
            (tmp_path / "run/step-00000001").rename(tmp_path / "run/step-00000001.aside")


def test_a_frozen_base_is_written_once_under_a_journal_with_going_back(tmp_path: Path) -> None:
    """One checkpoint is kept, and each step is durable: checkpoints come and go, with the journals that lead on."""
    store, saved, written = tmp_path / "run", dict[int, dict[str, tuple[object, ...]]](), list[int]()
    seeds = itertools.count(10)

    def process(recovery_s: float, *legs: tuple[int | None, int, int]) -> None:
        """In each leg go back to a step, if there is one, and save the steps from the second number to the third."""
        job = Job(store, keep=1, every_step=True, recovery_s=recovery_s)
        with job.checkpointer as checkpointer:
            for back, first, last in legs:
                if back is not None:
                    assert checkpointer.load(job.state, step=back).step == back
                    assert content(job.state) == saved[back]
                    checkpointer.rewind(back)
                for step in range(first, last + 1):
                    torch.manual_seed(next(seeds))  # a step that is made again is another one
                    job.save(step)
                    before, saved[step] = saved.get(step), content(job.state)
                    assert before != saved[step]
                    assert content(fresh_load(store, step)) == saved[step]
        written.extend(job.written)
        assert disk_bytes(store) < BASE_BYTES + 5 * SMALL_BYTES

    at_once, never = 1e-9, 1e9  # a load would take longer than it may
    process(at_once, (None, 1, 4))
    process(never, (4, 5, 7), (6, 7, 8))
    process(at_once, (7, 8, 11))
    process(never, (11, 12, 13))
    assert written[0] > BASE_BYTES
    assert len(written) >= 5, "there were other whole checkpoints, too"
    assert max(written[1:]) < SMALL_BYTES
    assert content(fresh_load(store, 13)) == saved[13]
