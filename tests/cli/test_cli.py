"""The command line: tables for users, JSON for programs, exit status for scripts, and no torch to read checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from typer.testing import CliRunner, Result

import flowstone as fs
from flowstone.cli import app
from flowstone.commit.entries import step_directory
from flowstone.format.manifest import decode_manifest, encode_manifest
from forge import edit_manifest, flip, place_of
from small_state import STEP, state

Script = Callable[..., "subprocess.Popen[str]"]
VERBS = ["ls", "show", "verify"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def two(checkpoint: Path) -> Path:
    """A store with steps 7 and 8."""
    with fs.Checkpointer(checkpoint.parent) as checkpointer:
        more = {"rng": fs.rng(), "odd": float("nan"), "keys": {(1, 2): torch.float16}}
        checkpointer.save(STEP + 1, state(2.0) | more)
    return checkpoint.parent


def test_ls_lists_every_step(two: Path) -> None:
    done = run("ls", two)
    assert done.exit_code == 0
    lines = [line for line in done.stdout.splitlines() if " ok " in line]
    assert [line.split()[1] for line in lines] == ["7", "8"]
    assert "2.6 MB" in lines[0]


def test_ls_json_says_the_same(two: Path) -> None:
    (two / ".saving-00000009-dead").mkdir()
    done = run("ls", two, "--json")
    record = json.loads(done.stdout)
    assert done.exit_code == 0
    assert [(row["step"], row["error"], row["ranks"]) for row in record["checkpoints"]] == [(7, None, 1), (8, None, 1)]
    assert record["leftovers"] == [".saving-00000009-dead"]
    first = two / "step-00000007"
    files = ["index.safetensors", "objects.json", "rank-00000.safetensors"]
    assert record["checkpoints"][0]["bytes"] == sum((first / name).stat().st_size for name in files)


def test_show_tells_tensors_objects_and_files(two: Path) -> None:
    done = run("show", two, "--step", 7)
    assert done.exit_code == 0
    assert f"step 7 in {two}/step-00000007" in done.stdout.replace("\n", "")
    tables = done.stdout.partition("object ")
    rows = {line.split("│")[1].strip(): line for line in tables[0].splitlines() if line.count("│") > 2}
    assert "bfloat16" in rows["table"]
    assert "6x4" in rows["table"]
    assert "is small" in rows["tied"]
    assert "655360" in rows["big"]
    objects = {line.split("│")[1].strip(): line for line in tables[2].splitlines() if line.count("│") > 2}
    assert "2 entries: step, text" in objects["objects"]
    assert "tensor tied" in objects["tied"]


def test_show_says_how_many_entries_there_are(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": {}, "y": {"a": 1}, "z": {"b": 2, "c": 3}})
    stdout = run("show", store).stdout
    assert [line.split("│")[2].strip() for line in stdout.splitlines() if line.startswith(("│ x", "│ y", "│ z"))] == [
        "no entry", "1 entry: a", "2 entries: b, c",
    ]


def test_show_json_says_everything(two: Path) -> None:
    done = run("show", two, "--json")
    record = json.loads(done.stdout)
    tensors = {entry["name"]: entry for entry in record["tensors"]}
    assert (done.exit_code, record["step"]) == (0, 8)
    assert (tensors["table"]["dtype"], tensors["table"]["shape"]) == ("bfloat16", [6, 4])
    assert tensors["tied"]["alias_of"] == "small"
    assert record["objects"]["objects"] == {"step": 3, "text": "x" * 10}
    assert record["objects"]["odd"] == "nan"
    assert record["objects"]["keys"] == {"(1, 2)": "torch.dtype float16"}
    assert record["objects"]["big"] == "tensor big"
    assert len(record["per_rank"]["rng"]) == 1
    assert {file["name"] for file in record["files"]} == {"index.safetensors", "objects.json", "rank-00000.safetensors"}


def test_show_tells_how_it_was_written(store: Path) -> None:
    engine = fs.EngineOptions(backend="posix", direct="off", queue_depth=3, request_bytes=4 << 20, workers=1)
    with fs.Checkpointer(store, engine=engine) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(9)})
    with fs.Checkpointer(store, engine=fs.EngineOptions(backend="posix", direct="off", queue_depth=5)) as checkpointer:
        checkpointer.save(2, {"x": torch.ones(9)})
    shown = run("show", store, "--step", 1).stdout.replace("\n", " ")
    assert "posix, buffered, 3 requests of up to 4 MiB in flight, 1 worker(s)" in shown
    assert "explicit settings" in shown
    shown = run("show", store).stdout.replace("\n", " ")
    assert "default settings, backend, direct, queue_depth as given" in shown
    io = json.loads(run("show", store, "--step", 1, "--json").stdout)["io"]
    assert (io["backend"], io["direct"], io["alignment"], io["queue_depth"], io["workers"]) == ("posix", False, 1, 3, 1)
    assert (io["request_bytes"], io["origin"]) == (4 << 20, "explicit")
    assert io["requests"] >= 1


def test_show_leaves_out_what_an_earlier_writer_did_not_record(two: Path) -> None:
    later = ("workers", "requests", "origin", "explicit")
    edit_manifest(two / "step-00000008", lambda m: [m["io"].pop(name) for name in later])
    done = run("show", two)
    assert done.exit_code == 0
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("written by"))
    assert line.endswith("in flight")


def test_show_cuts_a_long_list_unless_asked(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"m": [torch.ones(1)] + [torch.full((1,), float(i)) for i in range(50)]})
    assert "and 11 more tensors (--all shows them)" in run("show", store).stdout
    everything = run("show", store, "--all").stdout
    assert "m.50" in everything
    assert "more tensors" not in everything


def test_verify_says_sound_or_where_not(two: Path) -> None:
    done = run("verify", two)
    assert done.exit_code == 0
    assert "all bytes are intact" in done.stdout
    flip(*place_of(two / "step-00000008", "big"))
    done = run("verify", two)
    assert done.exit_code == 1
    assert "rank-00000.safetensors: tensor 'big', chunk 0" in done.stdout
    assert "damaged in 1 place" in done.stdout
    assert run("verify", two, "--step", 7).exit_code == 0


def test_verify_json_lists_findings(two: Path) -> None:
    flip(*place_of(two / "step-00000008", "small"))
    (two / "step-00000008/notes.txt").write_text("mine")
    done = run("verify", two, "--json")
    record = json.loads(done.stdout)
    assert (done.exit_code, record["sound"], record["step"], record["extra"]) == (1, False, 8, ["notes.txt"])
    (finding,) = record["findings"]
    assert finding["file"] == "rank-00000.safetensors"
    assert finding["what"].startswith("tensor 'small', chunk 0")


def test_a_damaged_manifest_is_named_by_every_verb(two: Path) -> None:
    (two / "step-00000008/manifest.json").write_text("{")
    done = run("ls", two)
    assert done.exit_code == 1
    assert "damaged" in done.stdout
    assert " ok " in done.stdout, "the other step is still listed"
    record = json.loads(run("ls", two, "--json").stdout)
    assert "manifest.json is truncated or was altered" in record["checkpoints"][1]["error"]
    for verb in ("show", "verify"):
        done = run(verb, two)
        assert done.exit_code == 1
        assert done.stdout == ""
        assert done.stderr.startswith(f"DamagedError: {two}/step-00000008/manifest.json is truncated")
        assert "Traceback" not in done.stderr
        record = json.loads(run(verb, two, "--json").stdout)
        assert record["error"] == "DamagedError"
        assert record["facts"]["found"] == "1 bytes"


def test_a_checkpoint_of_a_newer_version_is_told_as_such(two: Path) -> None:
    edit_manifest(two / "step-00000008", lambda m: m.update(flowstone=9))
    done = run("verify", two)
    assert done.exit_code == 2
    assert done.stderr.startswith("UnsupportedFormatError: ")
    assert "upgrade flowstone" in done.stderr
    done = run("ls", two)
    assert done.exit_code == 2
    assert "not readable: " in done.stdout


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_path_without_a_checkpoint_ends_with_status_2(tmp_path: Path, verb: str, as_json: bool) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/mum.txt").write_text("dear")
    expected = {"missing": "NotAStoreError" if verb == "ls" else "NoCheckpointError", "letters": "NotAStoreError"}
    for name, error in expected.items():
        done = run(verb, tmp_path / name, *["--json"] * as_json)
        assert done.exit_code == 2
        text = json.loads(done.stdout)["error"] if as_json else done.stderr.partition(":")[0]
        assert text == error


@pytest.mark.parametrize("verb", VERBS)
def test_a_bare_checkpoint_directory_is_a_path_too(checkpoint: Path, verb: str) -> None:
    assert run(verb, checkpoint).exit_code == 0


def test_names_with_markup_are_shown_as_they_are(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"[red]x[/]": torch.ones(1), "m": {"w[0:2]": torch.ones(2)}, "o": "[bold]"})
    shown = run("show", store).stdout
    assert "[red]x[/]" in shown
    assert "w[0:2]" in shown
    assert "[bold]" in shown


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("as_json", [False, True])
def test_reading_verbs_import_no_torch(two: Path, script: Script, verb: str, as_json: bool) -> None:
    text = (
        "import sys\nfrom typer.testing import CliRunner\nfrom flowstone.cli import app\n"
        "done = CliRunner().invoke(app, sys.argv[1:])\n"
        "print(done.exit_code, 'torch' in sys.modules, bool(done.stdout))\n"
    )
    process = script(text, verb, two, *["--json"] * as_json)
    out, err = process.communicate(timeout=120)
    assert out == "0 False True\n", err


def test_reading_tensors_with_numpy_imports_no_torch(two: Path, script: Script) -> None:
    text = (
        "import sys, flowstone as fs\nfound = fs.open(sys.argv[1])\n"
        "print(found.read('small', framework='numpy').tolist(), found.verify().sound, 'torch' in sys.modules)\n"
    )
    out, err = script(text, two).communicate(timeout=120)
    assert out == "[2.0, 2.0, 2.0, 2.0, 2.0] True False\n", err


@pytest.mark.parametrize("verb", VERBS)
def test_piped_output_is_free_of_progress_and_of_escapes(two: Path, verb: str) -> None:
    command = [sys.executable, "-m", "flowstone", verb, str(two)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "\r" not in done.stdout
    assert "\x1b" not in done.stdout


def test_version_and_unknown_verbs() -> None:
    assert run("--version").stdout == f"flowstone {fs.__version__}\n"
    assert run("frobnicate").exit_code == 2


_COUNTED = """
import collections, os, sys
from typer.testing import CliRunner
from flowstone.cli import app
store, calls, listed, opened = sys.argv[1], collections.Counter(), [], []
def audit(event, given):
    if event in ("os.listdir", "os.scandir") and str(given[0]).startswith(store):
        listed.append(given[0])
    if event == "open" and str(given[0]).startswith(store):
        opened.append(os.path.basename(given[0]))
def count(frame, event, what):
    if event == "c_call" and what.__module__ in ("posix", "_io"):
        calls[what.__name__] += 1
sys.addaudithook(audit)
sys.setprofile(count)
done = CliRunner().invoke(app, ["ls", *sys.argv[1:]])
sys.setprofile(None)
print(done.exit_code, done.stdout.count("12345"), len(listed))
print(max(calls[name] for name in ("open", "stat", "lstat", "readlink")), calls["fstat"])
print(sorted({"numpy", "rich", "torch"} & set(sys.modules)))
print(*[f"{name}={opened.count(name)}" for name in sorted(set(opened))])
"""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_long_listing_opens_each_manifest_once_and_imports_little(
    checkpoint: Path, script: Script, as_json: bool
) -> None:
    many, store = 300, checkpoint.parent
    manifest = decode_manifest((checkpoint / "manifest.json").read_bytes(), path="")
    for step in range(123450000, 123450000 + many):
        (store / step_directory(step)).mkdir()
        (store / step_directory(step) / "manifest.json").write_bytes(encode_manifest(replace(manifest, step=step)))
    out, err = script(_COUNTED, store, *["--json"] * as_json).communicate(timeout=120)
    first, most, imported, opened = out.splitlines()
    status, shown, listed = first.split()
    assert (status, imported) == ("0", "[]"), err
    assert int(shown) in (many, 2 * many)
    assert int(listed) <= 3, "the store is listed again and again"
    often, sizes = map(int, most.split())  # imports look for files, too
    assert often <= many + 150, "more than one call of a kind for each checkpoint"
    assert sizes <= 2 * many + 150, "Python asks each file's size once more than we do"
    assert opened == f"flowstone.json=1 manifest.json={many + 1}"


@pytest.mark.parametrize("verb", ["verify", "import", "export"])
def test_ray_that_is_not_installed_is_told_with_what_to_install(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    targets = {"verify": [], "import": [tmp_path / "new"], "export": [tmp_path / "hf"]}[verb]
    done = run(verb, checkpoint, *targets, "--section", "", "--ray") if targets else run(verb, checkpoint, "--ray")
    assert done.exit_code == 2
    assert "FrameworkError: Ray is not installed" in done.stderr
    assert 'next        pip install "ray[train]==' in done.stderr
