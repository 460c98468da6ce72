"""Every verb of the command line, and of `fs.open`, on a checkpoint in a bucket."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import json
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save_file
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli.app import app
from flowstone.convert.copy import BUDGET_BYTES_MIN
from flowstone.errors import LockedError, StepExistsError, StorageError
from flowstone.store.holders import machine_and_process
from flowstone.store.memory import MemoryStore
from flowstone.store.objects.client import RetryPolicy
from flowstone.store.objects.store import ObjectStore
from memory_agent import own_agent
from object_server import Server

BRIEF = RetryPolicy(budget_s=0.3, request_s=5, first_delay_s=0.01, delay_s_max=0.05)


def training(seed: int = 1) -> dict[str, object]:
    """More than two windows of a conversion with the least budget."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(900, 900), torch.nn.Linear(900, 800))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 900)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": seed}


def saved(place: object, state: dict[str, object], step: int = 1, **options: object) -> None:
    with fs.Checkpointer(place, **options) as ckpt:  # type: ignore[arg-type]
        ckpt.save(step, state).committed.result(60)


def run(*arguments: object) -> dict[str, object]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    decoded: dict[str, object] = json.decode(result.stdout)
    return decoded


@pytest.mark.parametrize("compress", ["auto", "max"])
def test_an_export_from_a_bucket_is_that_of_a_directory(url: str, tmp_path: Path, compress: str) -> None:
    state, engine = training(), fs.EngineOptions(compress=compress)  # type: ignore[arg-type]
    saved(url, state, engine=engine)
    saved(tmp_path / "run", state, engine=engine)
    run("export", url, tmp_path / "from-bucket", "--budget", BUDGET_BYTES_MIN, "--skip", "optimizer.*")
    run("export", tmp_path / "run", tmp_path / "from-disk", "--skip", "optimizer.*")
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (tmp_path / "from-disk" / name).exists():
            assert (tmp_path / "from-bucket" / name).read_bytes() == (tmp_path / "from-disk" / name).read_bytes()
    assert list((tmp_path / "from-bucket").iterdir())


def test_an_export_into_a_bucket_is_that_into_a_directory(url: str, tmp_path: Path) -> None:
    saved(tmp_path / "run", training())
    for to in ("hf", "dcp"):
        report = run("export", tmp_path / "run", f"{url}/{to}", "--to", to, "--budget", BUDGET_BYTES_MIN)
        run("export", tmp_path / "run", tmp_path / to, "--to", to)
        assert report["path"] == f"{url}/{to}"
        store = ObjectStore(f"{url}/{to}")
        assert sorted(store.names()) == sorted(path.name for path in (tmp_path / to).iterdir())
        for name in store.names():
            if not name.startswith("."):  # DCP's own table holds what it was told of time
                assert len(store.read(name)) == (tmp_path / to / name).stat().st_size
    weights = load_safetensors(ObjectStore(f"{url}/hf").read("model.safetensors"))
    assert np.array_equal(weights["0.weight"], fs.open(tmp_path / "run").read("model.0.weight", framework="numpy"))
    run("export", tmp_path / "run", f"{url}/file.pt", "--to", "torch")
    run("export", tmp_path / "run", tmp_path / "file.pt", "--to", "torch")
    assert ObjectStore(url).read("file.pt") == (tmp_path / "file.pt").read_bytes()
    with pytest.raises(StorageError, match="already exists"):
        fs.export(tmp_path / "run", f"{url}/hf")
    with pytest.raises(StorageError, match="already exists"):
        fs.export(tmp_path / "run", f"{url}/file.pt", to="torch")


def test_an_import_into_a_bucket_is_a_checkpoint_like_any_other(url: str, tmp_path: Path) -> None:
    tensors = {f"layer.{n}": np.random.default_rng(n).random(400_000, np.float32) for n in range(6)}
    save_file(tensors, tmp_path / "model.safetensors")
    report = run("import", tmp_path / "model.safetensors", url, "--step", 3, "--budget", BUDGET_BYTES_MIN)
    assert report["path"] == f"{url}/step-00000003"
    checkpoint = fs.open(url)
    assert checkpoint.step == 3
    assert checkpoint.verify().sound
    for name, value in tensors.items():
        assert np.array_equal(checkpoint.read(f"model.{name}", framework="numpy"), value)
    with pytest.raises(StepExistsError, match="newest step 3"):
        fs.import_checkpoint(tmp_path / "model.safetensors", url, step=3)
    with fs.Checkpointer(url) as ckpt:  # its lock was given up
        ckpt.save(4, {"x": 1}).committed.result(60)


def test_from_bucket_to_bucket_and_to_any_store(url: str) -> None:
    state = training()
    saved(f"{url}/a", state)
    run("import", f"{url}/a", f"{url}/b", "--step", 1)
    memory = MemoryStore()
    fs.import_checkpoint(f"{url}/a", memory, step=1)
    for item in (f"{url}/b", memory):
        report = fs.diff(f"{url}/a", item)
        assert report.equal
        assert len(report.tensors) == len(fs.open(f"{url}/a").tensors)
        assert fs.open(item).verify().sound


def test_a_diff_of_buckets_finds_the_element_that_differs(url: str, tmp_path: Path) -> None:
    state = training()
    saved(f"{url}/a", state)
    with torch.no_grad():
        state["model"][1].weight[3, 7] += 1  # type: ignore[index]
    saved(f"{url}/b", state)
    saved(tmp_path / "b", state)
    for other in (f"{url}/b", tmp_path / "b"):
        result = CliRunner().invoke(app, ["diff", f"{url}/a", str(other), "--json", "--budget", str(BUDGET_BYTES_MIN)])
        assert result.exit_code == 1, result.output
        differing = [tensor for tensor in json.decode(result.stdout)["tensors"] if not tensor["equal"]]
        found_at = [(row["name"], row["unequal"], row["largest_at"]) for row in differing]
        assert found_at == [("model.1.weight", 1, [3, 7])]
    trusted = fs.diff(f"{url}/a", f"{url}/b", trust_digests=True)
    assert [difference.name for difference in trusted.differing] == ["model.1.weight"]
    assert trusted.bytes < 1 << 24


def test_a_pack_of_a_bucket_and_into_one(url: str, tmp_path: Path) -> None:
    state = training()
    saved(f"{url}/a", state)
    for target in (f"{url}/packed", tmp_path / "packed"):
        run("pack", f"{url}/a", target)
        assert fs.open(target).verify().sound
        assert fs.diff(f"{url}/a", target).equal
        with pytest.raises(StorageError, match=r"not empty|already exists"):
            fs.pack(f"{url}/a", target)


def test_du_counts_every_object_of_a_bucket_once(url: str) -> None:
    with fs.Checkpointer(url) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": np.zeros(step * 100_000)}).committed.result(60)
    results = run("du", url, "--step", 1)
    store = ObjectStore(url)
    steps = {
        step: sum(store.size(f"step-0000000{step}/{name}") for name in store.names(f"step-0000000{step}"))
        for step in (1, 2)
    }
    assert {step["step"]: step["bytes"] for step in results["steps"]} == steps  # type: ignore[attr-defined]
    assert results["removing"] == {"steps": [1], "freed_bytes": steps[1]}
    assert results["bytes"] == sum(steps.values()) + store.size("flowstone.json") + store.size("flowstone.lock")


def test_what_measures_a_disk_refuses_a_bucket_by_name(url: str) -> None:
    refused = CliRunner().invoke(app, ["bench", "tune", url])
    assert refused.exit_code != 0
    assert "URL" in refused.output


def test_a_run_in_memory_is_flushed_into_a_bucket(url: str) -> None:
    with own_agent():
        saved("memory://flushed", {"x": np.arange(2_000_000.0), "epoch": 7}, step=5)
        copied = run("flush", "memory://flushed", url)
    assert (copied["path"], copied["step"], copied["skipped_reason"]) == (url, 5, "")
    checkpoint = fs.open(url)
    assert checkpoint.objects["epoch"] == 7
    assert checkpoint.verify().sound


def test_what_is_open_in_a_bucket_is_read_in_every_way(url: str) -> None:
    state = training()
    saved(url, state)
    checkpoint, model = fs.open(url), state["model"]
    assert isinstance(model, torch.nn.Module)
    weight = model.get_parameter("1.weight").detach()
    assert torch.equal(checkpoint["model.1.weight"][2:5, 100:300], weight[2:5, 100:300])
    assert torch.equal(checkpoint.read("model.1.weight", fs.Box((5, 0), (3, 900))), weight[5:8])
    streamed = dict(checkpoint.stream("model.*"))
    assert streamed.keys() == {f"model.{name}" for name in model.state_dict()}
    assert all(torch.equal(streamed[f"model.{name}"], value) for name, value in model.state_dict().items())
    again = torch.nn.Sequential(torch.nn.Linear(900, 900), torch.nn.Linear(900, 800))
    again.load_state_dict(checkpoint.state_dict("model"))
    assert torch.equal(again[1].weight, weight)
    optimizer = torch.optim.AdamW(again.parameters())
    optimizer.load_state_dict(checkpoint.state_dict("optimizer"))


# What ends early


IMPORT = "import sys, flowstone as fs; fs.import_checkpoint(sys.argv[1], sys.argv[2], step=1, budget_bytes=32 << 20)"
EXPORT = "import sys, flowstone as fs; fs.export(sys.argv[1], sys.argv[2], budget_bytes=32 << 20)"


def killed_in_mid_upload(program: str, source: object, target: str, server: Server) -> None:
    """Run a program until an upload of its own has begun, which does not end; then kill it."""
    server.fail(share=1, kinds=("held",), only="end")
    job = subprocess.Popen([sys.executable, "-c", program, str(source), target])
    while not server.uploads(target):
        assert job.poll() is None, "it has ended before it was killed"
    job.send_signal(signal.SIGKILL)
    job.wait()
    server.fail(share=0)
    assert server.uploads(target)


def test_an_import_that_was_killed_leaves_no_checkpoint_and_the_next_one_sweeps(
    url: str, server: Server, tmp_path: Path
) -> None:
    save_file({"a": np.random.default_rng(1).random(5_000_000)}, tmp_path / "model.safetensors")
    killed_in_mid_upload(IMPORT, tmp_path / "model.safetensors", url, server)
    with pytest.raises(fs.NoCheckpointError):
        fs.open(url)
    report = fs.import_checkpoint(tmp_path / "model.safetensors", url, step=1)
    assert report.resumed_bytes == 0
    assert fs.open(url).verify().sound
    assert server.uploads(url) == []


def test_an_export_that_was_killed_is_begun_anew_where_it_was(url: str, server: Server, tmp_path: Path) -> None:
    state = {"model": {"a": np.random.default_rng(1).random(5_000_000)}}
    saved(tmp_path / "run", state)
    killed_in_mid_upload(EXPORT, tmp_path / "run", f"{url}/hf", server)
    store = ObjectStore(f"{url}/hf")
    assert ".flowstone-export" in store.names()
    fs.export(tmp_path / "run", f"{url}/hf")
    assert store.names() == ("model.safetensors",)
    assert np.array_equal(load_safetensors(store.read("model.safetensors"))["a"], state["model"]["a"])


def test_two_exports_to_one_url_do_not_meet(url: str, tmp_path: Path) -> None:
    saved(tmp_path / "run", {"model": {"a": np.zeros(10)}})
    machine, process = machine_and_process()
    store = ObjectStore(f"{url}/hf")
    for other in ("elsewhere", machine):
        note = {"holder": "the other one", "machine": other, "process": process, "files": ["a"]}
        store.client.once.put(".flowstone-export", json.encode(note))
        with pytest.raises(LockedError, match="another export") as caught:
            fs.export(tmp_path / "run", f"{url}/hf")
        assert caught.value.facts["holder"] == "the other one"
    store.client.once.put(".flowstone-export", b"what somebody else has put there")
    with pytest.raises(StorageError, match="was not written by an export"):
        fs.export(tmp_path / "run", f"{url}/hf")


def test_an_import_whose_bucket_fails_says_so_and_the_next_one_sweeps_what_it_could_not_remove(
    url: str, server: Server, tmp_path: Path
) -> None:
    save_file({"a": np.random.default_rng(1).random(2_000_000)}, tmp_path / "model.safetensors")
    store = ObjectStore(url, patience=BRIEF)
    fs.import_checkpoint(tmp_path / "model.safetensors", store, step=1)
    server.fail(share=1, kinds=("denied",), method="POST")  # begins an upload, or removes
    with pytest.raises(StorageError, match="cannot upload"):
        fs.import_checkpoint(tmp_path / "model.safetensors", store, step=2)
    server.fail(share=0)
    assert fs.open(url).step == 1
    fs.import_checkpoint(tmp_path / "model.safetensors", store, step=2)
    assert fs.open(url).verify().sound


def test_a_source_in_a_bucket_that_is_damaged_is_refused(url: str) -> None:
    saved(url, training())
    store = ObjectStore(url)
    path = "step-00000001/rank-00000.safetensors"
    content = bytearray(store.read(path))
    content[len(content) // 2] ^= 1
    store.client.once.put(path, bytes(content))
    with pytest.raises(fs.DamagedError, match="does not match its digest"):
        fs.diff(url, url)
