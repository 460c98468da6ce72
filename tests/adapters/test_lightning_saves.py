"""Parts of Lightning's adapter that need no Lightning: values, order of saves and removals, files of dead processes."""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import flowstone as fs
from flowstone.adapters.dcp.target import target_of
from flowstone.adapters.lightning.generators import Generators
from flowstone.adapters.lightning.reading import await_writer, read
from flowstone.adapters.lightning.saves import LightningSaves
from flowstone.adapters.lightning.values import validated
from flowstone.state.classes import CLASSES


@fs.register_class
class Colour(IntEnum):
    RED = 3


@fs.register_class
class Mode(Enum):
    FAST = "fast"


@fs.register_class
@dataclass
class Schedule:
    warmup: int
    table: torch.Tensor


Point = fs.register_class(namedtuple("Point", "x y"))


class Unregistered(Enum):
    ONE = 1


@pytest.fixture
def saves() -> Any:
    made = LightningSaves(fs.EngineOptions())
    yield made
    made.close()


def save(saves: LightningSaves, path: Path, state: dict[str, object], **options: bool) -> None:
    chosen = {"keep_name": True, "in_background": True} | options
    saves.save(target_of(path, None), validated(state), **chosen)


def test_without_lightning_the_error_says_what_to_install() -> None:
    if importlib.util.find_spec("lightning") is not None:
        pytest.skip("lightning is installed here")
    with pytest.raises(fs.FrameworkError, match="lightning is not installed") as caught:
        from flowstone.adapters.lightning import FlowstoneIO  # noqa: F401
    assert "pip install lightning" in str(caught.value)
    with pytest.raises(fs.FrameworkError, match="pip install lightning"):
        from flowstone.adapters.lightning import GeneratorStates  # noqa: F401


def test_values_that_json_lacks_come_back_as_they_were(saves: LightningSaves, tmp_path: Path) -> None:
    module = torch.nn.BatchNorm1d(4)
    state: dict[str, Any] = {
        "state_dict": module.state_dict(),
        "hyper_parameters": {
            "colour": Colour.RED, "mode": [Mode.FAST], "at": (Point(torch.ones(2), Path("/a")), 1),
            "took": timedelta(3, 4, 5), "when": datetime(2026, 1, 2, tzinfo=UTC), "day": date(2026, 1, 2),
            "arguments": Namespace(lr=0.1, inner=Namespace(deep=timedelta(1))), "lists": defaultdict(list, {"a": [1]}),
            "schedule": Schedule(3, torch.ones(3)),
            "keys": {1: 2, (3, "x"): torch.zeros(2)}, "device": torch.device("cpu"), "none": None,
        },
    }
    save(saves, tmp_path / "x.ckpt", state)
    saves.wait()
    content = read(tmp_path / "x.ckpt")
    hyper, expected = content["hyper_parameters"], state["hyper_parameters"]
    assert content["state_dict"]._metadata == module.state_dict()._metadata
    assert type(content["state_dict"]) is OrderedDict
    assert torch.equal(hyper["keys"].pop((3, "x")), expected["keys"].pop((3, "x")))
    (point, entry), (whole, _) = hyper.pop("at"), expected.pop("at")
    assert (type(point), point.y, entry) == (Point, Path("/a"), 1)
    assert torch.equal(point.x, whole.x)
    schedule, planned = hyper.pop("schedule"), expected.pop("schedule")
    assert type(schedule) is Schedule
    assert schedule.warmup == planned.warmup
    assert torch.equal(schedule.table, planned.table)
    assert hyper == expected
    assert {key: type(item) for key, item in hyper.items()} == {key: type(item) for key, item in expected.items()}
    assert hyper["lists"].default_factory is list


def test_what_has_no_plain_form_is_refused_all_of_it_by_name() -> None:
    state = {"hyper_parameters": {"net": torch.nn.Linear(1, 1), "width": 3}, "callbacks": {"Mine": {"f": [print]}}}
    with pytest.raises(fs.UnsupportedStateError) as caught:
        validated(state)
    message = str(caught.value)
    with pytest.raises(fs.UnsupportedStateError, match=r"state_dict\.w: torch\.Tensor"):
        validated({"state_dict": {"w": torch.empty(3, device="meta")}})
    assert "hyper_parameters.net: torch.nn.modules.linear.Linear" in message
    assert "callbacks.Mine.f.0: builtins.builtin_function_or_method" in message
    assert "save_hyperparameters(ignore=['net'])" in message


def test_parts_of_a_tensor_are_refused_since_one_rank_writes() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(fs.UnsupportedStateError, match=r"state_dict\.w: .*DTensor") as caught:
            validated({"state_dict": {"w": part}})
        assert "with a Checkpointer, in a callback" in str(caught.value)
    finally:
        dist.destroy_process_group()


def test_a_value_that_no_load_could_make_is_refused_when_it_is_saved() -> None:
    """Nothing shows its class where Lightning loads."""
    member = Unregistered.ONE
    for value in (member, [member], {member: 1}, defaultdict(Unregistered), torch.Generator()):
        with pytest.raises(fs.UnsupportedStateError, match="hyper_parameters") as caught:
            validated({"hyper_parameters": {"value": value}})
        assert "fs.register_class()" in str(caught.value)


def test_a_class_that_is_not_registered_where_it_is_read_is_refused_by_name(
    saves: LightningSaves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saves, tmp_path / "x.ckpt", {"hyper_parameters": {"a": Schedule(1, torch.ones(2)), "mode": Mode.FAST}})
    saves.wait()
    assert read(tmp_path / "x.ckpt")["hyper_parameters"]["mode"] is Mode.FAST
    monkeypatch.setattr(CLASSES, "_by_name", {})
    with pytest.raises(fs.UnsupportedFormatError, match="not registered") as caught:
        read(tmp_path / "x.ckpt")
    assert f"{__name__}.Schedule" in str(caught.value)


def test_tied_weights_are_stored_once_and_tied_again(saves: LightningSaves, tmp_path: Path) -> None:
    first, second = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
    second.weight = first.weight
    state = {"state_dict": torch.nn.Sequential(first, second).state_dict()}
    for background in (True, False):
        save(saves, tmp_path / "x.ckpt", state, in_background=background)
        saves.wait()
        assert fs.open(tmp_path / "x.ckpt").manifest.data_bytes == 4 * (300 * 300 + 600)
        state_dict = read(tmp_path / "x.ckpt")["state_dict"]
        assert state_dict["0.weight"].data_ptr() == state_dict["1.weight"].data_ptr()
        assert torch.equal(state_dict["1.weight"], first.weight)


def test_what_changes_after_the_save_is_not_in_it(saves: LightningSaves, tmp_path: Path) -> None:
    weight = torch.zeros(2_000_000)
    for step in range(1, 6):
        weight.fill_(step)
        save(saves, tmp_path / f"x-{step}", {"w": weight, "step": [step]})
    weight.fill_(9)
    saves.wait()
    for step in range(1, 6):
        assert fs.open(tmp_path / f"x-{step}").step == step
        assert torch.equal(read(tmp_path / f"x-{step}")["w"], torch.full((2_000_000,), float(step)))


def test_a_checkpoint_is_removed_only_once_the_next_one_is_committed(saves: LightningSaves, tmp_path: Path) -> None:
    """A removal that comes right after a save that is still being written, as ModelCheckpoint's do."""
    state = {"w": torch.zeros(5_000_000)}
    seen = []
    for step in range(1, 5):
        save(saves, tmp_path / f"x-{step}", state)
        assert (tmp_path / f"x-{step}").is_dir(), "its name is taken at once"
        saves.remove(tmp_path / f"x-{step - 1}")
        seen.append(any((tmp_path / f"x-{index}" / "manifest.json").exists() for index in range(step + 1)) or step == 1)
    saves.wait()
    assert all(seen)
    assert os.listdir(tmp_path) == ["x-4"]


def test_after_a_lost_save_nothing_is_removed_until_one_is_committed(saves: LightningSaves, tmp_path: Path) -> None:
    save(saves, tmp_path / "x-1", {"w": torch.zeros(3)})
    saves.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        save(saves, tmp_path / "x-2", {"w": torch.zeros(10_000)})
        saves.remove(tmp_path / "x-1")
        with pytest.raises(fs.SaveFailedError, match="x-2 failed"):
            saves.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["x-1"]
    saves.wait()  # raised once
    save(saves, tmp_path / "x-3", {"w": torch.zeros(3)})
    saves.remove(tmp_path / "x-1")
    saves.wait()
    assert os.listdir(tmp_path) == ["x-3"]


@pytest.mark.usefixtures("warm")
def test_a_killed_save_leaves_no_name_taken_for_the_next_process(tmp_path: Path) -> None:
    script = """if True:
        import os, sys, signal
        from pathlib import Path
        from flowstone import EngineOptions
        from flowstone.adapters.dcp.target import target_of
        from flowstone.adapters.folder import CheckpointFolder
        folder = CheckpointFolder(Path(sys.argv[1]), EngineOptions())
        claim = folder.begin(target_of(sys.argv[1] + "/x-7", None), keep_name=True)
        print("begun", flush=True)
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "begun\n"
    held = sorted(os.listdir(tmp_path))
    assert len(held) == 3, held  # the name, the draft, the claim
    with pytest.raises(fs.NoCheckpointError, match="not finished"):
        read(tmp_path / "x-7")
    with pytest.raises(fs.LockedError, match="is still running"):
        await_writer(tmp_path / "x-7", deadline_s=0.05)
    other = LightningSaves(fs.EngineOptions())
    save(other, tmp_path / "x-8", {"w": torch.zeros(3)})
    other.close()
    assert set(held) < set(os.listdir(tmp_path)), "a living process keeps what is its own"
    with pytest.raises(fs.LockedError):
        save(other, tmp_path / "x-7", {"w": torch.zeros(3)})
    writer.communicate("")
    assert writer.returncode == -signal.SIGKILL
    await_writer(tmp_path / "x-7", deadline_s=60)
    again = LightningSaves(fs.EngineOptions())
    save(again, tmp_path / "x-9", {"w": torch.zeros(3)})
    again.close()
    assert sorted(os.listdir(tmp_path)) == ["x-8", "x-9"]


def test_a_removal_opens_its_folder_at_once(saves: LightningSaves, tmp_path: Path) -> None:
    """Not on the thread that commits: the caller's next save opens the same folder meanwhile, and both would sweep."""
    save(saves, tmp_path / "x-1", {"w": torch.zeros(20_000_000)})
    (tmp_path / "other").mkdir()
    left = tmp_path / "other" / target_of(tmp_path / "other" / "x-0", None).draft_directory
    left.mkdir()
    saves.remove(tmp_path / "other" / "x-0")
    assert not left.exists()
    saves.wait()


def test_a_save_at_once_after_a_lost_one_leaves_nothing(
    saves: LightningSaves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, wait = threading.Event(), saves.wait
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        saves._background._thread.submit(gate.wait)  # so that the first is under way until the next one waits for it
        monkeypatch.setattr(saves, "wait", lambda: (gate.set(), wait()))
        save(saves, tmp_path / "x-1", {"w": torch.zeros(10_000)})
        with pytest.raises(fs.SaveFailedError, match="x-1 failed"):
            save(saves, tmp_path / "x-2", {"w": torch.zeros(3)}, in_background=False)
    finally:
        gate.set()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("warm")
def test_a_lost_save_ends_a_process_of_multiprocessing_with_status_1(tmp_path: Path) -> None:
    script = """if True:
        import multiprocessing, resource, sys, torch
        from pathlib import Path
        from flowstone import EngineOptions
        from flowstone.adapters.dcp.target import target_of
        from flowstone.adapters.lightning.saves import LightningSaves
        from flowstone.adapters.lightning.values import validated
        def work():
            global saves
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            saves = LightningSaves(EngineOptions())
            state = validated({"w": torch.zeros(10_000)})
            saves.save(target_of(sys.argv[1] + "/x-1", None), state, keep_name=True, in_background=True)
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        print(process.exitcode)
    """
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n", done.stderr
    assert "x-1 failed in the background" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_link_to_a_save_that_never_ended_leads_to_the_newest_beside_it(
    saves: LightningSaves, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As ModelCheckpoint(save_last="link") leaves one where the process is killed before the commit."""
    for step in (1, 2):
        save(saves, tmp_path / f"x-{step}", {"step": step})
        saves.wait()
        os.utime(tmp_path / f"x-{step}" / "manifest.json", (step, step))
    (tmp_path / "last").symlink_to("x-2")
    assert read(tmp_path / "last") == {"step": 2}
    assert caplog.messages == []
    (tmp_path / "x-3").mkdir()
    for target in ("x-3", "x-4"):  # a name that is kept, and one that is gone
        (tmp_path / "last").unlink()
        (tmp_path / "last").symlink_to(target)
        assert read(tmp_path / "last") == {"step": 2}
    assert "x-2 is read, the newest checkpoint beside it" in caplog.text
    with pytest.raises(fs.NoCheckpointError, match="not finished") as caught:
        read(tmp_path / "x-3")
    assert "x-2, x-1" in str(caught.value)


def test_generators_continue_where_they_were_and_only_for_as_many_ranks() -> None:
    saved = Generators().state_dict()
    expected = torch.rand(3)
    Generators().load_state_dict(saved)
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(fs.MismatchError, match="another number of ranks"):
        Generators().load_state_dict({"ranks": saved["ranks"] * 2})
