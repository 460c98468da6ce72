"""Ray Train on a local cluster: killed and resumed, with the store in Ray's storage or elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from jobs import HERE, is_installed

if not is_installed("ray"):
    pytest.skip("`make test-integrations` installs ray", allow_module_level=True)

import pyarrow.fs
import ray
import ray_train_act
import torch
from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.storage import StorageContext

import flowstone as fs
from flowstone.adapters.ray.upload import upload

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "disabled",
    "PYTHONPATH": str(HERE), "RAY_TRAIN_V2_ENABLED": "1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with mock.patch.dict(os.environ, ENVIRONMENT):
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def fit(folder: Path, workers: int = 2, failures: int = 0, files: Any = None, **config: Any) -> Result:
    """Train, as the run `gpt` in `folder`."""
    trainer = TorchTrainer(
        ray_train_act.train, train_loop_config={"folder": str(folder), **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="gpt", storage_path=str(folder), failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2), storage_filesystem=files,
        ),
    )
    return trainer.fit()


def ends(folder: Path, workers: int = 2) -> list[Any]:
    return [json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(workers)]


def resumed(folder: Path) -> set[str]:
    return {path.read_text() for path in folder.glob("resumed-*")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("calm")
    result = fit(folder)
    value = ends(folder)
    assert value[0]["model"] == value[1]["model"]
    assert value[0]["generator"] != value[1]["generator"]
    assert Path(result.checkpoint.path) == folder / "gpt" / "step-00000012"
    assert fs.open(folder / "gpt").verify().step == 12
    return value


@pytest.mark.parametrize("background", [False, True])
def test_a_worker_that_is_killed_costs_no_bit(undisturbed: list[Any], tmp_path: Path, background: bool) -> None:
    result = fit(tmp_path, failures=1, die_at=8, background=background)
    assert (tmp_path / "died").exists()
    assert resumed(tmp_path) == {"None", "6"}
    assert ends(tmp_path) == undisturbed
    assert result.metrics == {"steps": 12}
    kept = sorted(path.name for path in (tmp_path / "gpt").glob("step-*"))
    assert kept == ["step-00000009", "step-00000012"], "Ray keeps two"


def test_a_step_that_was_saved_and_not_reported_is_set_aside(undisturbed: list[Any], tmp_path: Path) -> None:
    fit(tmp_path, failures=1, die_unreported_at=6)
    assert (tmp_path / "died").exists()
    assert resumed(tmp_path) == {"None", "3"}
    assert ends(tmp_path) == undisturbed
    assert len(list((tmp_path / "gpt").glob(".superseded-00000006-*"))) == 1


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on another file system."""
    place = Path("/dev/shm") / f"flowstone-{os.getpid()}"
    place.mkdir()
    yield place
    shutil.rmtree(place)


def test_a_store_elsewhere_is_uploaded_and_resumed_by_another_number_of_workers(
    undisturbed: list[Any], tmp_path: Path, memory: Path
) -> None:
    """Of a store that keeps one step."""
    result = fit(tmp_path, steps=8, store=str(memory / "run"), keep=1)
    assert Path(result.checkpoint.path) == tmp_path / "gpt" / "step-00000006"
    assert fs.open(result.checkpoint.path).verify().extra == ()
    again = fit(tmp_path, store=str(memory / "run"), keep=1)
    assert ends(tmp_path) == undisturbed, "a new trainer of that name resumes"
    assert resumed(tmp_path) == {"None", "6"}
    assert fs.diff(again.checkpoint.path, memory / "run").equal
    fit(tmp_path, workers=3, steps=15, store=str(memory / "other"))
    assert resumed(tmp_path) == {"None", "6", "12"}, "where the store has nothing, Ray's copy is loaded"
    assert fs.open(memory / "other").step == 15


def test_the_store_of_another_run_is_refused(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "old") as checkpointer:
        checkpointer.save(100, {"model": {"w": torch.ones(4)}})
    with pytest.raises(Exception, match="holds step 100, but Ray knows no checkpoint of this run"):
        fit(tmp_path, store=str(tmp_path / "old"))
    assert fs.open(tmp_path / "old").step == 100


@pytest.fixture
def saved(tmp_path: Path) -> fs.Checkpoint:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(4, {"model": {"w": torch.randn(500, 500)}})
    return fs.open(tmp_path / "run")


def storage(folder: Path, files: Any = None) -> StorageContext:
    return StorageContext(str(folder) if files is None else "bucket", "gpt", storage_filesystem=files)


def test_an_upload_is_independent_of_the_store(saved: fs.Checkpoint, tmp_path: Path) -> None:
    """On one file system it takes no room, and the store's retention does not take it away."""
    for _ in range(2):  # Ray tries again
        uploaded = upload(saved, storage(tmp_path / "ray"))
        assert Path(uploaded.path) == tmp_path / "ray" / "gpt" / "step-00000004"
    sizes = {path.stat().st_nlink for path in Path(uploaded.path).iterdir()}
    assert sizes == {2}
    shutil.rmtree(tmp_path / "run")
    assert fs.open(uploaded.path).verify().extra == ()
    assert fs.open(tmp_path / "ray" / "gpt").step == 4
    assert not list((tmp_path / "ray" / "gpt").glob(".saving-*"))


def test_what_an_earlier_try_has_uploaded_is_set_aside(saved: fs.Checkpoint, tmp_path: Path) -> None:
    """Ray has never known it: training resumed before that step, and came to it again."""
    with fs.Checkpointer(tmp_path / "earlier") as checkpointer:
        checkpointer.save(4, {"model": {"w": torch.randn(3)}})
    run = tmp_path / "ray" / "gpt"
    upload(fs.open(tmp_path / "earlier"), storage(tmp_path / "ray"))
    (run / ".saving-00000004-ray-0123").mkdir()  # and one that was killed
    assert fs.diff(upload(saved, storage(tmp_path / "ray")).path, saved.path).equal
    assert len(list(run.glob(".superseded-00000004-*"))) == 1
    assert not list(run.glob(".saving-*"))


def damage(checkpoint: fs.Checkpoint) -> None:
    with next(Path(checkpoint.path).glob("rank-*")).open("r+b") as segment:
        segment.seek(-100, os.SEEK_END)
        segment.write(b"damage")


def test_a_copy_is_verified_before_ray_knows_it(saved: fs.Checkpoint, tmp_path: Path, memory: Path) -> None:
    uploaded = upload(saved, storage(memory))
    assert fs.diff(uploaded.path, saved.path).equal
    shutil.rmtree(uploaded.path)
    damage(saved)
    with pytest.raises(fs.DamagedError):
        upload(saved, storage(memory))
    assert not list((memory / "gpt").glob("step-*"))


def test_an_upload_into_a_bucket_is_whole_and_its_manifest_last(saved: fs.Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "far" / "bucket" / "gpt" / "step-00000004").mkdir(parents=True)
    (tmp_path / "far" / "bucket" / "gpt" / "step-00000004" / "rank-00009.safetensors").touch()  # of one cut short
    files = pyarrow.fs.SubTreeFileSystem(str(tmp_path / "far"), pyarrow.fs.LocalFileSystem())
    uploaded = upload(saved, storage(tmp_path, files))
    assert uploaded.path == "bucket/gpt/step-00000004"
    with uploaded.as_directory() as place:
        assert fs.open(place).verify().extra == ()
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "far" / uploaded.path).iterdir()}
    assert max(times, key=lambda name: times[name]) == "manifest.json"
    damage(saved)
    shutil.rmtree(tmp_path / "far" / uploaded.path)
    with pytest.raises(fs.DamagedError):
        upload(saved, storage(tmp_path, files))
    assert not list((tmp_path / "far" / "bucket" / "gpt").glob("step-*"))
