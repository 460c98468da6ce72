"""Wrong first calls of every public verb: each gets an error that names the mistake and the correct call.

Values with a clear meaning are accepted: numpy's integers and tensors as steps, a number for `keep`, `~` in a path.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import flowstone as fs

Script = Callable[..., "subprocess.Popen[str]"]
MODEL = torch.nn.Linear(3, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one checkpoint, of step 5; not to be changed."""
    store = tmp_path_factory.mktemp("calls") / "run"
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(5, {"model": MODEL, "x": torch.arange(12.0).reshape(3, 4), "s": torch.tensor(3.0), "n": 7})
    return store


def refusal(act: Callable[[], object], kind: type[fs.FlowstoneError] = fs.ArgumentError) -> fs.FlowstoneError:
    with pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind
    assert "next" in caught.value.facts, "an error says what to do next"
    return caught.value


# Where


@pytest.mark.parametrize(
    ("path", "says", "remedy"),
    [
        ("hdfs://node/run", "'hdfs://node/run' is a URL", "mount it"),
        (Path("hdfs://node/run"), "'hdfs:/node/run' is a URL", "mount it"),
        ("FTP://host/run", "is a URL", "mount it"),
        ("unheard+of://x", "is a URL", "mount it"),
        ("file:///scratch/run", "is a URL", "write only the path: '/scratch/run'"),
        ("", "the path '' does not name a directory", "Is a variable unset?"),
        ("  ", "does not name a directory", "Is a variable unset?"),
        ("a\0b", "does not name a directory", "give the directory"),
        (None, "None is not a path", "give the directory for the checkpoints"),
        (3, "3 is not a path", "give the directory for the checkpoints"),
        (b"run", "b'run' is not a path", "give the directory for the checkpoints"),
        ({"run"}, "{'run'} is not a path", "give the directory for the checkpoints"),
        ("~no-such-user/run", "the home directory of", "write the full path"),
    ],
)
def test_what_names_no_directory_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: object, says: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (fs.Checkpointer, fs.open):
        error = refusal(lambda: call(path))  # type: ignore[operator] # noqa: B023
        assert says in error.message
        assert remedy in str(error.facts["next"])
    assert list(tmp_path.iterdir()) == []


def test_an_open_checkpoint_is_no_path_and_says_which_is(saved: Path) -> None:
    error = refusal(lambda: fs.Checkpointer(fs.open(saved)))  # type: ignore[arg-type]
    assert error.facts["next"] == f"give the path of its store: {str(saved)!r}"


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with fs.Checkpointer("~/run") as checkpointer:
        checkpointer.save(1, {"x": 1})
    assert fs.open(Path("~") / "run").path == str(tmp_path / "home" / "run" / "step-00000001")
    assert not (tmp_path / "~").exists()


def test_a_name_with_a_colon_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with fs.Checkpointer("lr:0.1/run") as checkpointer:
        checkpointer.save(1, {"x": 1})
    assert fs.open(tmp_path / "lr:0.1" / "run").step == 1


def test_a_relative_path_stays_where_it_was_when_the_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with fs.Checkpointer("run") as checkpointer:
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpointer.save(1, {"x": 1})
    assert fs.open(tmp_path / "run").step == 1


def test_a_relative_path_in_a_directory_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    error = refusal(lambda: fs.Checkpointer("run"), fs.StorageError)
    assert "the current directory is gone" in error.message


def test_a_checkpoint_in_the_place_of_its_store_is_named_as_such(saved: Path) -> None:
    step = saved / "step-00000005"
    before = sorted(step.iterdir())
    for act in (
        lambda it: it.load({"model": MODEL}), lambda it: it.save(6, {"x": 1}), lambda it: it.latest(),
    ):
        with fs.Checkpointer(step) as checkpointer:
            error = refusal(lambda: act(checkpointer), fs.NotAStoreError)  # noqa: B023
        assert error.message == f"{step} is a checkpoint, not a store of checkpoints"
        assert error.facts["next"] == f"give the directory above it: {saved}"
    assert sorted(step.iterdir()) == before, "a store was made inside of a checkpoint"


def test_a_directory_of_stores_says_which_they_are(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    error = refusal(lambda: fs.open(saved.parent), fs.NotAStoreError)
    assert error.facts["next"] == "give one of the stores in it: run"
    with fs.Checkpointer(saved.parent) as checkpointer, caplog.at_level(logging.WARNING, logger="flowstone"):
        assert checkpointer.latest() is None
    assert f"there is no checkpoint in {saved.parent}; stores are in run" in caplog.text


def test_a_file_in_the_place_of_a_store_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with fs.Checkpointer(tmp_path / "file") as checkpointer:
        for act in (checkpointer.latest, lambda: checkpointer.save(1, {"x": 1})):
            error = refusal(act, fs.StorageError)
            assert error.facts["next"] == "a file is where a directory should be; choose another path"


# Options


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("keep", "3", "neither a Keep nor a number"),
        ("keep", {"last": 3}, "neither a Keep nor a number"),
        ("keep", 0, "neither a Keep nor a number"),
        ("keep", True, "neither a Keep nor a number"),
        ("budget_bytes", "4GB", "must be an integer, not '4GB'"),
        ("budget_bytes", -1, "must be at least 0"),
        ("budget_bytes", 1 << 70, "must be less than"),
        ("budget_bytes", 1.5, "must be an integer, not 1.5"),
        ("on_error", "ignore", "neither 'raise' nor 'continue'"),
        ("on_error", True, "neither 'raise' nor 'continue'"),
        ("max_unsaved_steps", "3", "must be an integer"),
        ("max_unsaved_steps", -1, "must be at least 0"),
        ("engine", {"backend": "posix"}, "is not an EngineOptions"),
        ("engine", "posix", "is not an EngineOptions"),
        ("saves_in_flight", 0, "must be at least 1"),
        ("saves_in_flight", "2", "must be an integer"),
        ("saves_in_flight", None, "must be an integer"),
        ("deadline_s", "10", "is not a number"),
        ("deadline_s", None, "is not a number"),
        ("deadline_s", 0, "must be positive"),
        ("deadline_s", float("nan"), "is not a number"),
        ("on_event", "print", "is not callable"),
        ("on_event", [print], "is not callable"),
    ],
)
def test_an_option_that_cannot_be_is_refused_when_it_is_given(
    store: Path, option: str, value: object, says: str
) -> None:
    error = refusal(lambda: fs.Checkpointer(store, **{option: value}))  # type: ignore[arg-type]
    assert error.message.startswith(option)
    assert says in error.message
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    "act",
    [
        lambda: fs.Keep("3"), lambda: fs.Keep(2.5), lambda: fs.Keep(None), lambda: fs.Keep(True),
        lambda: fs.Keep(every="a"), lambda: fs.Keep(0), lambda: fs.Keep(every=0),
        lambda: fs.EngineOptions(queue_depth="4"), lambda: fs.EngineOptions(queue_depth=4.5),
        lambda: fs.EngineOptions(direct=True), lambda: fs.EngineOptions(read_in_place="yes"),
        lambda: fs.EngineOptions(write_bytes_per_s="1GB"), lambda: fs.EngineOptions(share_reads="no"),
        lambda: fs.EngineOptions(share_reads=None), lambda: fs.EngineOptions(backend=None),
        lambda: fs.Skip(3), lambda: fs.Skip(["a"]), lambda: fs.Skip(""), lambda: fs.Rename("a", None),
        lambda: fs.Rename({"a": "b"}, ""), lambda: fs.Init(None), lambda: fs.Cast(torch.float32),
        lambda: fs.Box("a", "b"), lambda: fs.Box(0, 3), lambda: fs.Box((0,), (1, 2)), lambda: fs.Box((-1,), (1,)),
    ],
)
def test_a_record_that_cannot_be_is_refused_when_it_is_made(act: Callable[[], object]) -> None:
    refusal(act)


@pytest.mark.parametrize(
    "act",
    [
        lambda: fs.Shard(torch.ones(2), 4, 0), lambda: fs.Shard(None, (4,), (0,)),
        lambda: fs.Shard([1.0], (4,), (0,)), lambda: fs.Shard(torch.ones(2), "4", "0"),
        lambda: fs.Shard(torch.ones(2), (4.5,), (0,)), lambda: fs.Shard(torch.ones(2), (4,), (3,)),
        lambda: fs.Flat(torch.ones(6), "abc"), lambda: fs.Flat(torch.ones(6), [("a", 3)]),
        lambda: fs.Flat(torch.ones(6), {"a": (6,)}), lambda: fs.Flat(torch.ones(6), [("a", (6,))], begin=0.5),
        lambda: fs.Flat(torch.ones(2, 3), [("a", (6,))]), lambda: fs.PerRank(1, redistribute="x"),
    ],
)
def test_a_part_of_a_state_that_cannot_be_is_refused_when_it_is_made(act: Callable[[], object]) -> None:
    refusal(act, fs.UnsupportedStateError)


def test_a_provider_of_no_type_is_refused() -> None:
    refusal(lambda: fs.register_provider(3), fs.ProviderError)  # type: ignore[call-overload]


def test_a_number_for_keep_keeps_so_many(store: Path) -> None:
    with fs.Checkpointer(store, keep=np.int64(2), budget_bytes=4e8) as checkpointer:  # type: ignore[arg-type]
        for step in (1, 2, 3):
            checkpointer.save(step, {"x": step})
    assert sorted(path.name for path in store.glob("step-*")) == ["step-00000002", "step-00000003"]


# Steps


WHOLE = {
    "numpy": np.int64(5), "numpy unsigned": np.uint8(5), "array": np.array(5), "tensor": torch.tensor(5),
    "small tensor": torch.tensor(5, dtype=torch.uint8),
}


@pytest.mark.parametrize("step", WHOLE.values(), ids=WHOLE)
def test_every_kind_of_integer_is_a_step(store: Path, step: int) -> None:
    with fs.Checkpointer(store) as checkpointer:
        save = checkpointer.save(step, {"x": torch.ones(2)})
        assert (save.step, type(save.step)) == (5, int)
        assert checkpointer.load({"x": torch.ones(2)}, step=step).step == 5
        checkpointer.rewind(step)
    assert fs.open(store, step).step == 5
    assert fs.open(store, step=step).manifest.step == 5


@pytest.mark.parametrize(
    "step",
    [True, np.bool_(True), torch.tensor(True), 5.0, torch.tensor(5.0), "5", -1, 10**16, np.array([5]), (5,), "latest",
     torch.ones(3).long(), torch.tensor(5, device="meta")],
)
def test_what_is_no_step_is_refused_by_every_verb(saved: Path, step: object) -> None:
    with fs.Checkpointer(saved) as checkpointer:
        for verb, act in {
            "save": lambda: checkpointer.save(step, {"x": 1}),  # type: ignore[arg-type]
            "load": lambda: checkpointer.load({"model": MODEL}, step=step),  # type: ignore[arg-type]
            "rewind": lambda: checkpointer.rewind(step),  # type: ignore[arg-type]
            "open": lambda: fs.open(saved, step),  # type: ignore[arg-type]
        }.items():
            error = refusal(act)
            assert error.message.startswith(f"{verb}: step ")
            assert "is not an integer within 0..1000000000000000" in error.message


# States


def test_swapped_arguments_of_save_are_told_as_such(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        for state in ({"x": 1}, MODEL):
            error = refusal(lambda: checkpointer.save(state, 5))  # type: ignore[arg-type] # noqa: B023
            assert error.message == "save: the arguments are in the wrong order"
            assert error.facts["next"] == "write save(step, state)"
    assert not store.exists()


def test_a_step_in_the_place_of_the_state_of_a_load_says_what_to_write(saved: Path) -> None:
    with fs.Checkpointer(saved) as checkpointer:
        for step in (5, np.int64(5)):
            error = refusal(lambda: checkpointer.load(step))  # type: ignore[arg-type] # noqa: B023
            assert str(error.facts["next"]).startswith("write load(state, step=")


@pytest.mark.parametrize(
    "state", [MODEL, torch.optim.SGD(MODEL.parameters()), torch.ones(3), None, [MODEL], (MODEL,), "model.pt"]
)
def test_what_is_no_dict_is_told_to_be_put_into_one(saved: Path, store: Path, state: object) -> None:
    with fs.Checkpointer(store) as checkpointer, fs.Checkpointer(saved) as other:
        for act in (lambda: checkpointer.save(5, state), lambda: other.load(state)):  # type: ignore[arg-type]
            error = refusal(act, fs.UnsupportedStateError)
            assert error.facts["next"] == 'pass {"model": model, ...}'


def test_a_load_into_an_empty_state_is_no_load(saved: Path) -> None:
    with fs.Checkpointer(saved) as checkpointer:
        error = refusal(lambda: checkpointer.load({}))
    assert error.message == "load: the state is empty, so nothing would be loaded"
    assert error.facts["checkpoint"] == "model, x, s, n"


def test_a_class_in_the_place_of_its_object_is_named(saved: Path) -> None:
    with fs.Checkpointer(saved) as checkpointer:
        error = refusal(lambda: checkpointer.load({"model": torch.nn.Linear}))
        assert error.message == "load: state['model'] is the class torch.nn.modules.linear.Linear"


@pytest.mark.parametrize("fence", [True, None, "none"])
def test_a_fence_that_is_none_is_refused(store: Path, fence: object) -> None:
    with fs.Checkpointer(store) as checkpointer:
        refusal(lambda: checkpointer.save(1, {"x": 1}, fence=fence))  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["verify_first", "fallback"])
def test_a_flag_that_is_none_is_refused(saved: Path, flag: str) -> None:
    with fs.Checkpointer(saved) as checkpointer:
        refusal(lambda: checkpointer.load({"model": MODEL}, **{flag: "yes"}))  # type: ignore[arg-type]


@pytest.mark.parametrize("rules", [["n"], "n", None, [fs.Skip], {"a": "b"}, [fs.Skip("n"), "x"], 3])
def test_rules_that_are_none_are_refused_and_not_passed_over(saved: Path, rules: object) -> None:
    with fs.Checkpointer(saved) as checkpointer:
        assert refusal(lambda: checkpointer.load({"model": MODEL}, rules=rules)).message.startswith("rules: ")  # type: ignore[arg-type]
    refusal(lambda: fs.explain(fs.open(saved), {"model": MODEL}, rules=rules))  # type: ignore[arg-type]


def test_one_rule_alone_is_a_rule(saved: Path) -> None:
    with fs.Checkpointer(saved) as checkpointer:
        report = checkpointer.load({"model": torch.nn.Linear(3, 3, bias=False)}, rules=fs.Skip("model.bias"))
    assert report.skipped == ("model.bias",)


def test_a_load_is_strict_within_a_section_whose_name_has_dots(store: Path) -> None:
    tensor, other = torch.zeros(2), torch.ones(2)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"a.b": {"x": tensor, "y": other}, "a": {"z": tensor}, "a.b.c.d": other})
        with pytest.raises(fs.MismatchError) as caught:
            checkpointer.load({"a.b": {"x": torch.empty(2)}})
        assert caught.value.differences == ("unexpected  a.b.y: in the checkpoint, not in your state",)
        checkpointer.load({"a.b.c.d": torch.empty(2)})
        checkpointer.load({"a": {"z": torch.empty(2)}})


# Readers


@pytest.mark.parametrize("path", ["store", "nope", {"model": MODEL}, None])
def test_explain_of_what_is_no_open_checkpoint_says_what_to_write(path: object) -> None:
    error = refusal(lambda: fs.explain(path, {"model": MODEL}))  # type: ignore[arg-type]
    assert error.facts["next"] == "write fs.explain(fs.open(path, step), state)"


def test_an_engine_that_is_none_is_refused_by_open(saved: Path) -> None:
    refusal(lambda: fs.open(saved, engine="posix"))  # type: ignore[arg-type]


def test_a_tensor_that_is_not_there_is_named_and_what_is_no_tensor_too(saved: Path) -> None:
    checkpoint = fs.open(saved)
    error = refusal(lambda: checkpoint.read("weight"), fs.NoTensorError)
    assert str(error).startswith("no tensor 'weight' in this checkpoint; there is model.weight\n")
    assert isinstance(error, KeyError)
    assert refusal(lambda: checkpoint.read("n"), fs.NoTensorError).facts["objects"] == "there is 'n' in .objects"
    for name in (None, 0):
        refusal(lambda: checkpoint.read(name), fs.NoTensorError)  # type: ignore[call-overload] # noqa: B023
    refusal(lambda: checkpoint.tensors["weight"], fs.NoTensorError)
    assert checkpoint.tensors.get("weight") is None
    refusal(lambda: checkpoint.read("x", framework="jax"))  # type: ignore[call-overload]


def test_what_may_not_be_read_or_written_names_the_operation(tmp_path: Path, script: Script) -> None:
    if os.geteuid() != 0:
        pytest.skip("dropping rights needs root")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o755)
    locked.chmod(0o555)
    tmp_path.chmod(0o755)
    text = (
        "import os, sys, flowstone as fs\n"
        "import flowstone.checkpointer\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for act in (lambda: fs.Checkpointer(sys.argv[1]).save(1, {'x': 1}),\n"
        "            lambda: fs.Checkpointer(sys.argv[1] + '/deeper/run').save(1, {'x': 1})):\n"
        "    try:\n        act()\n"
        "    except fs.StorageError as error:\n        print(error.message, '|', error.facts['next'])\n"
    )
    out, err = script(text, locked).communicate(timeout=60)
    if "Permission" in err:
        pytest.skip("the interpreter's own files are not for that user")
    lines = out.splitlines()
    assert len(lines) == 2, err
    assert all("give this user the permission, or choose another path" in line for line in lines)
