"""Bad input gets a typed error with the object, the place and the next step; nothing is lost, nothing half changed.

Damaged and forged files are in commit/test_contents.py; here are states, places and times of calls.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import flowstone as fs
from flowstone.commit.writer import StoreWriter
from forge import content, flip, place_of
from small_state import STEP, state

Script = Callable[..., "subprocess.Popen[str]"]


def steps(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir() if not path.name.startswith("flowstone."))


# Places


def test_no_checkpoint_where_nothing_is(store: Path) -> None:
    with pytest.raises(fs.NoCheckpointError) as caught:
        fs.open(store)
    assert caught.value.message == f"no checkpoint in {store}"
    assert caught.value.facts == {
        "found": "none",
        "next": "check the path; to start without a checkpoint, call latest() first, and skip load() if it is None",
    }
    blank = state()
    before = content(blank)
    with fs.Checkpointer(store) as checkpointer:
        assert checkpointer.latest() is None
        with pytest.raises(fs.NoCheckpointError, match="no checkpoint in"):
            checkpointer.load(blank)
    assert content(blank) == before
    assert not store.exists(), "looking for a checkpoint made a directory"


def test_no_checkpoint_of_that_step_lists_those_there_are(checkpoint: Path) -> None:
    for ask in (lambda: fs.open(checkpoint.parent, step=3), lambda: _load(checkpoint.parent, state(), step=3)):
        with pytest.raises(fs.NoCheckpointError) as caught:
            ask()
        assert caught.value.message == f"no checkpoint of step 3 in {checkpoint.parent}"
        assert caught.value.facts["found"] == f"steps {STEP}"


def test_a_directory_that_is_no_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("pass")
    for ask in (lambda: fs.open(tmp_path), lambda: _load(tmp_path, state())):
        with pytest.raises(fs.NotAStoreError) as caught:
            ask()
        assert caught.value.message == f"{tmp_path} is neither a store nor a checkpoint"
        assert caught.value.facts["found"] == "model.py"
        assert "flowstone.json" in str(caught.value.facts["missing"])
        assert "check the path" in str(caught.value.facts["next"])


@pytest.mark.parametrize(("names", "writer", "source"), [
    ((".metadata", "__0_0.distcp"), "torch.distributed.checkpoint", ""),
    ((".snapshot_metadata", "0"), "TorchSnapshot", ""),
    (("_METADATA", "d"), "Orbax", ""),
    (("latest_checkpointed_iteration.txt", "iter_0000010"), "Megatron-core", ""),
    (("latest", "global_step10"), "DeepSpeed", ""),
    (("config.json", "model.safetensors"), "safetensors", ""),
    (("config.json", "pytorch_model.bin"), "torch.save", "/pytorch_model.bin"),
])
def test_a_checkpoint_of_others_is_told_how_to_come_in(
    tmp_path: Path, names: tuple[str, ...], writer: str, source: str
) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    for ask in (lambda: fs.open(tmp_path), lambda: _load(tmp_path, state())):
        with pytest.raises(fs.NotAStoreError) as caught:
            ask()
        remedy = f"a checkpoint of {writer}: convert it by `flowstone import {tmp_path}{source} RUN`"
        assert remedy in str(caught.value.facts["next"])


def test_a_file_that_is_no_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"PK")
    for ask in (lambda: fs.open(path), lambda: _load(path, state())):
        with pytest.raises(fs.NotAStoreError, match=r"model\.pt is neither a store nor a checkpoint") as caught:
            ask()
        assert caught.value.facts["found"] == "a file"
        assert f"`flowstone import {path} RUN`" in str(caught.value.facts["next"])
    with fs.Checkpointer(path) as checkpointer, pytest.raises(fs.StorageError, match=r"cannot .*model\.pt"):
        checkpointer.save(1, state())


def test_a_damaged_marker_is_named(checkpoint: Path) -> None:
    flip(checkpoint.parent / "flowstone.json", 20)
    with pytest.raises(fs.DamagedError, match=r"flowstone\.json was altered"):
        fs.open(checkpoint.parent)
    with fs.Checkpointer(checkpoint.parent) as checkpointer, pytest.raises(fs.DamagedError, match=r"flowstone\.json"):
        checkpointer.save(9, state())
    assert fs.open(checkpoint).verify().sound, "the checkpoint itself is read without the marker"


def test_a_directory_of_checkpoints_without_a_marker_is_read_and_adopted(checkpoint: Path) -> None:
    (checkpoint.parent / "flowstone.json").unlink()
    assert fs.open(checkpoint.parent).step == STEP
    with fs.Checkpointer(checkpoint.parent) as checkpointer:
        assert checkpointer.load(state()).step == STEP
        checkpointer.save(STEP + 1, state())
    assert (checkpoint.parent / "flowstone.json").exists()
    assert steps(checkpoint.parent) == ["step-00000007", "step-00000008"]


_AS_NOBODY = """
import os, sys, torch, flowstone as fs
from pathlib import Path
locked, warm = Path(sys.argv[1]), sys.argv[2]
with fs.Checkpointer(warm) as checkpointer:  # imports everything while that is still allowed
    checkpointer.save(1, {"x": torch.ones(3)}).committed.result()
    checkpointer.load({"x": torch.ones(3)})
    fs.open(warm).verify()
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for act in (
    lambda: fs.open(locked / "unreadable" / "run"),
    lambda: fs.Checkpointer(locked / "unreadable" / "run").load({"x": torch.ones(3)}),
    lambda: fs.Checkpointer(locked / "unwritable").save(2, {"x": torch.ones(3)}),
    lambda: fs.Checkpointer(locked / "unwritable" / "new").save(1, {"x": torch.ones(3)}),
    lambda: fs.Checkpointer(locked / "unreadable" / "new").save(1, {"x": torch.ones(3)}),
):
    try:
        act()
        print("no error")
    except fs.StorageError as error:
        print(type(error).__name__, error.errno, str(error).replace("\\n", " | "))
print(fs.open(locked / "unwritable").verify().step, "readable all the same")
"""


def test_a_path_without_permission_is_named_with_the_operation(tmp_path: Path, warm_script: Script) -> None:
    locked = Path("/tmp") / f"flowstone-locked-{os.getpid()}"
    locked.mkdir(mode=0o755)
    try:
        for name in ("unreadable/run", "unwritable"):
            with fs.Checkpointer(locked / name) as checkpointer:
                checkpointer.save(1, {"x": torch.ones(3)})
        (locked / "unwritable/flowstone.lock").unlink()
        (locked / "unreadable").chmod(0o000)
        (locked / "unwritable").chmod(0o555)
        out, err = warm_script(_AS_NOBODY, locked, tmp_path / "warm").communicate(timeout=120)
    finally:
        (locked / "unreadable").chmod(0o755)
        (locked / "unwritable").chmod(0o755)
        subprocess.run(["rm", "-r", str(locked)], check=True)
    lines = out.splitlines()
    assert len(lines) == 6, err
    places = ("unreadable/run", "unreadable/run", "unwritable", "unwritable/new", "unreadable/new")
    for line, place in zip(lines[:5], places, strict=True):
        assert line.startswith("StorageError 13 cannot "), line
        assert f"{locked}/{place}" in line
        assert "EACCES" in line
        assert "give this user the permission, or choose another path" in line
    assert lines[5] == "1 readable all the same"


# States


class Opaque:
    """Something that no table knows."""


@pytest.mark.parametrize(
    ("value", "path", "actual"),
    [
        ({"deep": [1, Opaque()]}, "extra.deep.1", "test_bad_input.Opaque"),
        (lambda: None, "extra", "builtins.function"),
        (Opaque, "extra", "builtins.type"),
        ({"file": [open]}, "extra.file.0", "builtins.builtin_function_or_method"),
        ({"a": torch.zeros(2).to_sparse()}, "extra.a", "torch.Tensor"),
        ({"a": np.zeros(1, [("x", "i4")])}, "extra.a", "numpy.ndarray"),
        ({"a": torch.empty(2, device="meta")}, "extra.a", "torch.Tensor"),
    ],
)
def test_an_unsupported_object_is_refused_by_path_with_a_remedy(
    store: Path, value: object, path: str, actual: str
) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"extra": 1}).committed.result()
        with pytest.raises(fs.UnsupportedStateError) as caught:
            checkpointer.save(2, {"model": torch.nn.Linear(2, 2), "extra": value})
        assert caught.value.message.startswith(f"'{path}' ")
        assert caught.value.facts["found"] == actual
        assert caught.value.facts["next"]
        assert steps(store) == ["step-00000001"], "a refused save left something"
        checkpointer.save(2, {"extra": 2})
    assert fs.open(store).objects == {"extra": 2}


def test_names_that_collide_are_refused_with_both_paths(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer, pytest.raises(fs.CollisionError) as caught:
        checkpointer.save(1, {"a": {"b.c": torch.ones(1), "b": {"c": torch.zeros(1)}}})
    assert caught.value.message == "two paths of the state have the same name 'a.b.c'"
    assert {caught.value.facts["first"], caught.value.facts["second"]} == {
        "state['a']['b.c']", "state['a']['b']['c']"
    }
    assert "rename" in str(caught.value.facts["next"])


@pytest.mark.parametrize("step", [-1, 1.5, "7", True, 10**16])
def test_a_step_that_is_no_step_is_refused(store: Path, step: object) -> None:
    with fs.Checkpointer(store) as checkpointer, pytest.raises(ValueError, match="is not an integer within 0"):
        checkpointer.save(step, {"x": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("again", [5, 4, 0])
def test_a_step_saved_twice_or_below_the_newest_is_refused(store: Path, again: int) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(5, {"x": torch.ones(3)})
        with pytest.raises(fs.StepExistsError) as caught:
            checkpointer.save(again, {"x": torch.zeros(3)})
        assert caught.value.message == f"cannot save step {again} into {store}"
        assert caught.value.facts["found"] == "newest step 5"
        assert "rewind(" in str(caught.value.facts["next"])
    with fs.Checkpointer(store) as checkpointer, pytest.raises(fs.StepExistsError):
        checkpointer.save(again, {"x": torch.zeros(3)})
    assert fs.open(store).read("x").tolist() == [1, 1, 1]


def test_rewind_makes_room_for_steps_to_be_saved_anew(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"x": torch.full((3,), float(step))})
        checkpointer.rewind(1)
        assert checkpointer.latest().step == 1  # type: ignore[union-attr]
        checkpointer.save(2, {"x": torch.full((3,), 20.0)})
    assert fs.open(store).read("x").tolist() == [20, 20, 20]
    names = steps(store)
    assert sum(name.startswith(".superseded-") for name in names) == 2
    assert names[-2:] == ["step-00000001", "step-00000002"]


def test_rewind_to_a_step_that_is_not_there_changes_nothing(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        for step in (1, 3):
            checkpointer.save(step, {"x": 1})
        with pytest.raises(fs.NoCheckpointError, match="no checkpoint of step 2"):
            checkpointer.rewind(2)
    assert steps(store) == ["step-00000001", "step-00000003"]


def test_a_rewind_to_a_step_that_retention_gives_up_meanwhile_changes_nothing(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_remove, find = threading.Event(), StoreWriter.check_step_exists

    def newest(committed: Sequence[int]) -> Sequence[int]:
        assert len(committed) < 2 or may_remove.wait(60)
        return committed[-1:]

    def finding(writer: StoreWriter, step: int) -> None:
        find(writer, step)
        may_remove.set()

    monkeypatch.setattr(StoreWriter, "check_step_exists", finding)
    with fs.Checkpointer(store, keep=newest) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": torch.full((3,), float(step))}).committed.result()
        with pytest.raises(fs.NoCheckpointError, match="no checkpoint of step 1"):
            checkpointer.rewind(1)
    assert steps(store) == ["step-00000002"]
    assert fs.open(store).read("x").tolist() == [2, 2, 2]


# Loads that do not fit


def _load(store: Path, blank: dict[str, object], **options: object) -> fs.LoadReport:
    with fs.Checkpointer(store) as checkpointer:
        return checkpointer.load(blank, **options)  # type: ignore[arg-type]


def test_all_differences_are_listed_and_memory_is_untouched(checkpoint: Path) -> None:
    blank = state(9.0)
    blank["big"] = torch.zeros(7)
    blank["table"] = torch.full((6, 4), 9.0)
    blank["many"] = [*blank["many"], torch.ones(3)]  # type: ignore[misc]
    del blank["tied"]
    blank["model"] = torch.nn.Linear(2, 3)
    blank["objects"] = {"step": 0, "extra": torch.zeros(1)}
    before = content(blank)
    with pytest.raises(fs.MismatchError) as caught:
        _load(checkpoint.parent, blank)
    assert content(blank) == before
    kinds = {" ".join(line.split(":")[0].split()) for line in caught.value.differences}
    assert kinds == {
        "shape big", "dtype table", "missing many.3", "missing model.weight", "missing model.bias",
        "missing objects.extra", "unexpected objects.text",
    }
    text = str(caught.value)
    assert text.startswith("state and checkpoint differ in 7 places; nothing was changed")
    assert "shape       big: wanted (7,), stored (655360,)" in text
    assert "dtype       table: wanted float32, stored bfloat16" in text
    assert "next" in caught.value.facts


def test_a_stored_tensor_that_nobody_wants_is_unexpected(checkpoint: Path) -> None:
    blank = state(9.0)
    blank["many"] = blank["many"][:2]  # type: ignore[index]
    before = content(blank)
    with pytest.raises(fs.MismatchError) as caught:
        _load(checkpoint.parent, blank)
    assert caught.value.differences == ("unexpected  many.2: in the checkpoint, not in your state",)
    assert content(blank) == before


def test_a_mismatch_leaves_the_state_fit_to_be_saved(checkpoint: Path) -> None:
    with fs.Checkpointer(checkpoint.parent) as checkpointer:
        with pytest.raises(fs.MismatchError):
            checkpointer.load({"big": torch.zeros(3)})
        checkpointer.save(STEP + 1, {"big": torch.zeros(3)}).committed.result()


# Moments


def test_a_closed_checkpointer_refuses_everything(store: Path) -> None:
    checkpointer = fs.Checkpointer(store)
    checkpointer.save(1, {"x": 1})
    checkpointer.close()
    checkpointer.close()
    acts: list[Callable[[], object]] = [
        lambda: checkpointer.save(2, {"x": 1}), lambda: checkpointer.load({"x": 0}), checkpointer.latest,
        checkpointer.wait, checkpointer.fence, lambda: checkpointer.rewind(1),
    ]
    for act in acts:
        with pytest.raises(fs.ClosedError) as caught:
            act()
        assert caught.value.message == f"the Checkpointer of {store} is closed"
        assert caught.value.facts["next"] == "create a new one"
    assert steps(store) == ["step-00000001"]


_FORKED = """
import os, sys, torch, flowstone as fs
checkpointer = fs.Checkpointer(sys.argv[1])
checkpointer.save(1, {"x": torch.ones(1 << 20)})
child = os.fork()
if not child:
    for act in (lambda: checkpointer.save(2, {"x": 1}), lambda: checkpointer.load({"x": 1}), checkpointer.latest):
        try:
            act()
            print("no error")
        except fs.ClosedError as error:
            print(str(error).replace("\\n", " | ").replace(str(os.getppid()), "PARENT"), flush=True)
    checkpointer.close()
    sys.exit(0)
print("child", os.waitpid(child, 0)[1], flush=True)
print("parent", checkpointer.save(2, {"x": torch.ones(3)}).committed.result().step)
"""


def test_a_fork_is_told_to_make_its_own_and_the_parent_goes_on(store: Path, warm_script: Script) -> None:
    process = warm_script(_FORKED, store)
    out, err = process.communicate(timeout=120)
    message = f"the Checkpointer of {store} belongs to process PARENT; this process is a fork of it |   next        "
    message += "create one in this process, after the fork"
    assert out.splitlines() == [message, message, message, "child 0", "parent 2"], err
    assert process.returncode == 0
    assert fs.open(store).verify().step == 2


_WRITER = """
import sys, torch, flowstone as fs
checkpointer = fs.Checkpointer(sys.argv[1])
checkpointer.save(1, {"x": torch.ones(3)}).committed.result()
print("saved", flush=True)
sys.stdin.read()
"""


def test_a_second_writer_is_refused_by_name_until_the_first_is_dead(store: Path, warm_script: Script) -> None:
    first = warm_script(_WRITER, store)
    assert first.stdout is not None
    assert first.stdout.readline() == "saved\n"
    with fs.Checkpointer(store) as checkpointer:
        blank = {"x": torch.zeros(3)}
        assert checkpointer.load(blank).step == 1, "loads take no lock"
        with pytest.raises(fs.LockedError) as caught:
            checkpointer.save(2, blank)
        assert caught.value.message == f"cannot save into {store}: another job writes there"
        assert str(caught.value.facts["holder"]).startswith(f"process {first.pid} on ")
        assert "stop that job" in str(caught.value.facts["next"])
        first.kill()
        first.communicate()
        checkpointer.save(2, blank)
    assert fs.open(store).step == 2


def test_two_checkpointers_of_one_process_are_two_writers(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer, fs.Checkpointer(store) as other:
        checkpointer.save(1, {"x": 1})
        says = f"another Checkpointer of this process(.|\n)*process {os.getpid()} on"
        with pytest.raises(fs.LockedError, match=says):
            other.save(2, {"x": 2})
        checkpointer.close()
        other.save(2, {"x": 2})
    assert fs.open(store).step == 2


# A full disk

MIB = 1 << 20


def test_a_full_disk_says_what_is_needed_and_free_and_the_next_save_succeeds(
    small_disk: Callable[[int], Path],
) -> None:
    disk = small_disk(4 * MIB)
    with fs.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"x": torch.ones(MIB // 4)}).committed.result()
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(2 * MIB))
        with pytest.raises(fs.FullError) as caught:
            checkpointer.save(2, {"x": torch.zeros(MIB // 4)})
        error = caught.value
        assert error.message.startswith("no space to allocate ")
        assert "rank-00000.safetensors" in error.message
        assert "ENOSPC" in str(error.facts["reason"])
        assert MIB <= int(str(error.facts["needed"]).split()[0]) <= MIB + 16384
        assert 0 <= int(str(error.facts["free"]).split()[0]) < 2 * MIB
        assert "the previous checkpoint is untouched" in str(error.facts["next"])
        assert fs.open(disk / "run").verify().step == 1
        assert not list((disk / "run").glob(".saving-*")), "a failed save gives its space back"
        ballast.unlink()
        checkpointer.save(2, {"x": torch.zeros(MIB // 4)}).committed.result()
    assert fs.open(disk / "run").read("x").sum() == 0


def test_a_disk_that_fills_up_before_the_index_fails_the_commit_only(small_disk: Callable[[int], Path]) -> None:
    """The segment fits to the last page, what follows it does not."""
    disk = small_disk(3 * MIB)
    with fs.Checkpointer(disk / "run") as checkpointer:
        first = checkpointer.save(1, {"x": torch.ones(MIB // 4)}).committed.result()
        segment = first.manifest.segments[0].bytes
        ballast = disk / "ballast"
        available_bytes = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        ballast.write_bytes(bytes(available_bytes - segment))
        save = checkpointer.save(2, {"x": torch.zeros(MIB // 4)})
        error = save.committed.exception()
        assert isinstance(error, fs.FullError), error
        assert "index.safetensors" in error.message
        assert int(str(error.facts["needed"]).split()[0]) > 0
        assert str(error.facts["free"]) == "0 bytes"
        checkpointer.wait()  # the failure was handed out already
        assert fs.open(disk / "run").verify().step == 1
        ballast.unlink()
        checkpointer.save(3, {"x": torch.full((MIB // 4,), 3.0)})
    assert steps(disk / "run") == ["step-00000001", "step-00000003"]
    assert place_of(disk / "run/step-00000003", "x")


def test_a_first_save_that_was_cut_short_is_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "flowstone.lock").write_text("process 1 on host\n")
    (tmp_path / ".flowstone.json-00ff").write_text("{")
    with pytest.raises(fs.NoCheckpointError):
        fs.open(tmp_path)
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": 1})
    assert steps(tmp_path) == ["step-00000001"]
