"""`--ray`: verify, import, export and pack by tasks in a cluster of several processes equal those of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
from jobs import HERE, is_installed

if not is_installed("ray"):
    pytest.skip("`make test-integrations` installs ray", allow_module_level=True)

import ray
import ray_act
import torch
from safetensors.torch import save_file

import flowstone as fs
from flowstone.cluster import Cluster, ray_cluster
from flowstone.convert import copy

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "disabled",
    "PYTHONPATH": str(HERE),
}
BUDGET = 32 << 20
FLOWSTONE = str(Path(sys.executable).with_name("flowstone"))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster with two workers."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        started = ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield started.address_info["gcs_address"]
        ray.shutdown()


@pytest.fixture
def cluster(address: str) -> Iterator[Cluster]:
    with ray_cluster() as result:
        yield result
    assert ray.is_initialized(), "what this process has begun goes on"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store, and the same as a safetensors file: forty megabytes, in some windows of four."""
    root = tmp_path_factory.mktemp("model")
    noise = torch.Generator().manual_seed(1)
    tensors = {f"layer.{number}": torch.randn(1000, 1000 + number, generator=noise) for number in range(10)}
    with fs.Checkpointer(root / "run") as checkpointer:
        checkpointer.save(5, {"model": tensors})
    save_file(tensors, root / "model.safetensors")
    yield root
    shutil.rmtree(root)


def content(place: Path) -> dict[str, bytes]:
    files = [place] if place.is_file() else sorted(place.iterdir())
    return {path.name: path.read_bytes() for path in files}


def test_results_come_in_the_order_of_the_parts_and_two_are_under_way(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.cpus == 2
    with closing(cluster.each(ray_act.order, tmp_path, range(7))) as results:
        assert list(results) == list(range(7))


def test_a_delta_is_verified_as_by_one_process(cluster: Cluster, tmp_path: Path) -> None:
    """Step 2 refers to the file of step 1, which is removed, for all but one tensor."""
    tensors = {"still": torch.randn(3_000_000), "moves": torch.randn(600_000)}
    with fs.Checkpointer(tmp_path / "run", keep=1, engine=fs.EngineOptions(compress="derived")) as checkpointer:
        for step in (1, 2, 3):
            working = {name: tensor.bfloat16() for name, tensor in tensors.items()}
            checkpointer.save(step, {"master": tensors, "working": working}).committed.result()
            tensors["moves"] += 1
    checkpoint = fs.open(tmp_path / "run")
    assert any(row.home is not None for row in checkpoint.manifest.segments)
    assert checkpoint.verify(cluster=cluster) == checkpoint.verify()
    (base,) = (tmp_path / "run/step-00000003").glob("from-*")
    with base.open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"harmed")
    inspected = checkpoint.inspect(cluster=cluster)
    assert inspected == checkpoint.inspect()
    assert [finding.file for finding in inspected.findings] == [base.name]


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_an_export_is_the_same_as_by_one_process(model: Path, cluster: Cluster, tmp_path: Path, to: str) -> None:
    pairs: list[tuple[int, int]] = []
    for target, by in (("one", None), ("all", cluster)):
        (tmp_path / target).mkdir()
        fs.export(
            model / "run", tmp_path / target / "x", to=to, shard_bytes=9e6, budget_bytes=BUDGET, dtype="bf16",
            cluster=by, on_progress=(lambda done, total: pairs.append((done, total))) if by else None,
        )
    assert content(tmp_path / "all" / "x") == content(tmp_path / "one" / "x")
    assert pairs[-1][0] == pairs[-1][1]
    assert len(pairs) > 1 or to == "torch", "one file whose checks follow one another is one part"
    assert not list((tmp_path / "all").glob(".*"))


def test_an_import_is_the_same_as_by_one_process(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    fs.import_checkpoint(model / "model.safetensors", tmp_path / "one", budget_bytes=BUDGET)
    fs.import_checkpoint(model / "model.safetensors", tmp_path / "all", budget_bytes=BUDGET, cluster=cluster)
    segment = "step-00000000/rank-00000.safetensors"
    assert (tmp_path / "all" / segment).read_bytes() == (tmp_path / "one" / segment).read_bytes()
    assert fs.open(tmp_path / "all").verify(cluster=cluster).extra == ()


def test_a_pack_is_the_same_as_by_one_process(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    for target, by in (("one", None), ("all", cluster)):
        fs.pack(model / "run", tmp_path / target, budget_bytes=BUDGET, cluster=by)
    own, every = content(tmp_path / "one"), content(tmp_path / "all")
    assert own.keys() == every.keys()
    assert [name for name in own if own[name] != every[name]] == ["manifest.json"], "each has an identity of its own"
    assert fs.open(tmp_path / "all").verify(cluster=cluster).extra == ()


def test_what_one_process_has_begun_the_cluster_ends_and_the_other_way(
    model: Path, cluster: Cluster, tmp_path: Path
) -> None:
    fs.export(model / "run", tmp_path / "whole", budget_bytes=BUDGET)
    for first, then in ((None, cluster), (cluster, None)):
        target = tmp_path / ("by-all" if then else "by-one")

        def stop(done: int, total: int) -> None:
            if done > total // 2:
                raise KeyboardInterrupt

        with mock.patch.object(copy, "_WINDOWS_BETWEEN_SYNCS", 1), pytest.raises(KeyboardInterrupt):
            fs.export(model / "run", target, budget_bytes=BUDGET, on_progress=stop, cluster=first)
        report = fs.export(model / "run", target, budget_bytes=BUDGET, cluster=then)
        assert report.resumed_bytes > report.bytes // 3
        assert content(target) == content(tmp_path / "whole")


def test_workers_that_are_killed_in_the_middle_of_a_part_cost_nothing(
    model: Path, cluster: Cluster, tmp_path: Path
) -> None:
    fs.export(model / "run", tmp_path / "whole", budget_bytes=BUDGET)
    with mock.patch.object(copy, "copy_part_in_task", ray_act.die_in_the_middle):
        fs.export(model / "run", tmp_path / "hf", budget_bytes=BUDGET, cluster=cluster)
    assert len(list(tmp_path.glob("death-*"))) >= 2
    assert content(tmp_path / "hf") == content(tmp_path / "whole")


def test_a_part_whose_workers_die_again_and_again_is_given_up(cluster: Cluster) -> None:
    with pytest.raises(fs.errors.CancelledError, match="Ray did not finish a task"):
        list(cluster.each(ray_act.die, None, range(3)))


def test_errors_arrive_as_they_were_raised(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(fs.DamagedError, match=r"part 0 is damaged\n  next +restore it$") as caught:
        list(cluster.each(ray_act.fail, tmp_path, range(3)))
    assert type(caught.value) is fs.DamagedError
    assert caught.value.written == ("a.b",)
    with pytest.raises(FileNotFoundError) as missing:
        list(cluster.each(ray_act.refuse, tmp_path, range(3)))
    assert missing.value.filename == str(tmp_path / "missing")


def test_a_node_without_what_the_work_needs_is_told(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def work(shared, part): return part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(fs.errors.FrameworkError, match=r"cannot import a module that this command needs\n.*only_here"):
        list(cluster.each(import_module("only_here").work, None, range(3)))


def harmed(model: Path, place: Path) -> Path:
    """A copy of the store with three damaged chunks."""
    shutil.copytree(model / "run", place)
    with next(place.glob("step-*/rank-*")).open("r+b") as segment:
        for offset in (9 << 20, 20 << 20, 37 << 20):
            segment.seek(offset)
            segment.write(b"\xff" * 8)
    return place


def test_damage_is_told_as_by_one_process(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    store = harmed(model, tmp_path / "run")
    pairs: list[tuple[int, int]] = []
    by_all = fs.open(store).inspect(lambda done, total: pairs.append((done, total)), cluster=cluster)
    assert by_all == fs.open(store).inspect()
    assert len(by_all.findings) == 3
    assert len(pairs) > 1
    assert pairs[-1][0] == pairs[-1][1]
    with pytest.raises(fs.DamagedError) as by_cluster:
        fs.export(store, tmp_path / "a", budget_bytes=BUDGET, cluster=cluster)
    with pytest.raises(fs.DamagedError) as by_process:
        fs.export(store, tmp_path / "a", budget_bytes=BUDGET)
    assert str(by_cluster.value) == str(by_process.value)


def run(address: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "RAY_ADDRESS": address}
    )


def test_the_command_line_uses_the_cluster_that_ray_address_names(model: Path, address: str, tmp_path: Path) -> None:
    whole = run(address, FLOWSTONE, "verify", str(model / "run"), "--ray", "--json")
    assert json.loads(whole.stdout)["sound"], whole.stderr
    nowhere = run("127.0.0.1:1", FLOWSTONE, "verify", str(model / "run"), "--ray")
    assert nowhere.returncode == 2
    assert "there is no Ray cluster at 127.0.0.1:1" in nowhere.stderr
    done = run(address, FLOWSTONE, "verify", str(harmed(model, tmp_path / "run")), "--ray")
    assert (done.returncode, done.stdout.count("does not match its digest")) == (1, 3), done.stderr


@pytest.mark.parametrize("verb", ["export", "import", "pack"])
def test_verbs_that_write_take_the_cluster_too(model: Path, address: str, tmp_path: Path, verb: str) -> None:
    source = model / ("model.safetensors" if verb == "import" else "run")
    done = run(address, FLOWSTONE, verb, str(source), str(tmp_path / "x"), "--ray", "--budget", "32MiB", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes"] > 40e6
    nowhere = run("127.0.0.1:1", FLOWSTONE, verb, str(source), str(tmp_path / "y"), "--ray")
    assert nowhere.returncode == 2
    assert not (tmp_path / "y").exists()
    section = "" if verb == "export" else "model."
    checkpoint = fs.open(tmp_path / "x") if verb != "export" else None
    names = checkpoint.tensors if checkpoint else json.loads(done.stdout)["tensors"]
    assert sorted(names) == sorted(f"{section}layer.{number}" for number in range(10))
    assert checkpoint is None or checkpoint.verify().sound


def test_tasks_end_with_the_iterator_while_this_process_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    results = cluster.each(ray_act.only_the_first_ends, tmp_path, range(5))
    assert next(results) == 0
    until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    results.close()
    until(lambda: all_are_gone(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2, "no other part was begun"


def all_are_gone(folder: Path) -> bool:
    return not any(Path(f"/proc/{path.name[4:]}").exists() for path in folder.glob("pid-*"))


def test_an_interrupt_ends_the_tasks(address: str, tmp_path: Path) -> None:
    """By the signal that a terminal sends, with the cluster going on."""
    script = (
        "from contextlib import closing\nfrom pathlib import Path\nimport ray_act\n"
        f"from flowstone.cluster import ray_cluster\nfolder = Path({str(tmp_path)!r})\n"
        "with ray_cluster() as cluster, closing(cluster.each(ray_act.wait_for_ever, folder, 'ab')) as results:\n"
        "    list(results)\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "RAY_ADDRESS": address}, stderr=subprocess.PIPE, text=True
    )
    until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    driver.send_signal(signal.SIGINT)
    _, output = driver.communicate(timeout=60)
    assert "KeyboardInterrupt" in output
    until(lambda: all_are_gone(tmp_path))


def until(is_so: object) -> None:
    deadline = time.monotonic() + 60
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)
