"""`flowstone pack`: a step that refers to earlier ones becomes an ordinary checkpoint."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_resume import killed_until_done
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli import app
from flowstone.config import MIB
from flowstone.errors import ArgumentError, DamagedError, StorageError
from forge import content, flip
from lora_job import Job


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of a job with a frozen base; in the last two a part of the base has changed."""
    root = tmp_path_factory.mktemp("pack") / "run"
    job = Job(root)
    for step in range(1, 6):
        if step > 3:
            with torch.no_grad():
                job.model["base"][1].weight[0, 0] += 1
        job.save(step)
    job.checkpointer.close()
    assert fs.open(root).manifest.critical == ("delta",)
    return root


def loaded(path: Path) -> dict[str, object]:
    job = Job(path)
    for parameter in job.model.parameters():
        parameter.data.fill_(-1)
    with job.checkpointer as checkpointer:
        checkpointer.load(job.state)
    return job.state


def test_a_packed_step_is_an_ordinary_checkpoint(run: Path, tmp_path: Path) -> None:
    report = fs.pack(run, tmp_path / "packed")
    packed, source = fs.open(tmp_path / "packed"), fs.open(run)
    assert (report.step, packed.step, packed.manifest.critical) == (5, 5, ())
    assert packed.verify().sound
    assert {row.home for row in packed.manifest.segments} == {None}
    assert (packed.manifest.ranks, packed.manifest.store) == (source.manifest.ranks, source.manifest.store)
    assert packed.manifest.id != source.manifest.id
    assert packed.contents == source.contents
    assert fs.diff(packed, source).equal
    listed = load_file(tmp_path / "packed/rank-00000.safetensors")
    assert {name for name in listed if not name.startswith("__pad__")} == set(packed.tensors)


def test_it_loads_as_the_step_does(run: Path, tmp_path: Path) -> None:
    fs.pack(run, tmp_path / "store/step-00000005", step=5)
    assert content(loaded(tmp_path / "store")) == content(loaded(run))


def test_it_keeps_what_each_rank_has_of_its_own(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"rng": fs.rng(), "own": fs.PerRank({"t": torch.ones(3), "n": 1}), "tied": [1, 2]})
    fs.pack(tmp_path / "run", tmp_path / "packed")
    packed = fs.open(tmp_path / "packed")
    assert packed.contents.per_rank == fs.open(tmp_path / "run").contents.per_rank
    assert packed.read("own@0.t").tolist() == [1, 1, 1]
    assert packed.verify().sound


def test_a_step_may_be_packed_alone_after_its_store_is_gone(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-00000005", tmp_path / "alone")
    fs.pack(tmp_path / "alone", tmp_path / "packed")
    assert fs.diff(tmp_path / "packed", run).equal


def test_damage_ends_it_and_nothing_has_the_name(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-00000005", tmp_path / "alone")
    shared = max((tmp_path / "alone").glob("from-*"), key=lambda path: path.stat().st_size)
    flip(shared, shared.stat().st_size // 2)
    with pytest.raises(DamagedError, match="chunk"):
        fs.pack(tmp_path / "alone", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    flip(shared, shared.stat().st_size // 2)
    fs.pack(tmp_path / "alone", tmp_path / "packed")
    assert fs.open(tmp_path / "packed").verify().sound
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_place_that_is_taken_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/mine").write_text("")
    with pytest.raises(StorageError) as caught:
        fs.pack(run, tmp_path / "packed")
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(ArgumentError, match="the checkpoint of step 5 cannot have the name"):
        fs.pack(run, tmp_path / "step-00000004")


def test_killed_again_and_again_it_comes_to_the_same_end(tmp_path: Path) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(1024, 1024) for _ in range(10)]).requires_grad_(False)
    head = torch.nn.Linear(8, 8)
    state = {"model": torch.nn.ModuleDict({"base": model, "head": head}), "o": torch.optim.SGD(head.parameters())}
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).committed.result()
    fs.pack(tmp_path / "run", tmp_path / "whole")
    command = ("pack", str(tmp_path / "run"), str(tmp_path / "packed"), "--budget", "32MiB")
    assert killed_until_done(*command) >= 2
    names = ["index.safetensors", "objects.json", "rank-00000.safetensors"]
    for name in names:
        assert (tmp_path / "packed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert fs.open(tmp_path / "packed").verify().extra == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "run", "whole"]


def test_the_verb_says_what_it_did(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["pack", str(run), str(tmp_path / "a"), "--step", "3", "--json"])
    record = json.loads(done.stdout)
    assert (done.exit_code, record["step"], record["resumed_bytes"]) == (0, 3, 0)
    assert record["bytes"] > 12 * MIB
    assert sorted(record["files"]) == sorted(path.name for path in (tmp_path / "a").iterdir())
    done = CliRunner().invoke(app, ["pack", str(run), str(tmp_path / "a")])
    assert done.exit_code == 2
    assert done.stderr.startswith("StorageError: cannot ")
    done = CliRunner().invoke(app, ["pack", str(run), str(tmp_path / "b")])
    assert f"{tmp_path / 'b'}: step 5, " in done.stdout
