"""The command line with careless use: every verb with every kind of wrong argument. Never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli import app
from forge import edit_manifest

VERBS = ("ls", "show", "verify", "bench io", "bench tune", "bench --probe")
READERS = ("ls", "show", "verify")


def said(*args: object, status: tuple[int, ...] = (1, 2)) -> str:
    """What the command says; it ends as a command does, with one of those statuses."""
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exception is None or isinstance(done.exception, SystemExit), f"{args}: {done.exception!r}"
    assert done.exit_code in status, f"{args}: {done.exit_code}: {done.output}"
    assert "Traceback" not in done.output
    assert done.output.strip(), f"{args}: not a word"
    return done.output


def make_place(kind: str, tmp_path: Path) -> str:
    """A path that is no store, of that kind."""
    path = tmp_path / "place"
    if kind == "an empty name":
        return ""
    if kind == "a link to nowhere":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "a link to itself":
        path.symlink_to(path)
    elif kind == "a file":
        path.write_bytes(b"PK")
    elif kind == "below a file":
        (tmp_path / "file").write_bytes(b"")
        return str(tmp_path / "file" / "run")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory of other things":
        path.mkdir()
        (path / "model.py").write_text("pass")
    elif kind == "a directory as marker":
        (path / "flowstone.json").mkdir(parents=True)
    elif kind == "a directory as manifest":
        (path / "step-00000001" / "manifest.json").mkdir(parents=True)
    elif kind == "a long name":
        return str(tmp_path / ("n" * 300))
    elif kind == "a name with a zero":
        return str(tmp_path / "a\0b")
    elif kind == "a name of bytes":
        path = tmp_path / os.fsdecode(b"\xff\xfe")
    elif kind == "a URL":
        return "s3://bucket/run"
    return str(path)


WRONG_PLACES = (
    "nothing", "an empty name", "a link to nowhere", "a link to itself", "a file", "below a file", "a pipe",
    "a directory of other things", "a directory as marker", "a directory as manifest", "a long name",
    "a name with a zero", "a name of bytes", "a URL",
)


@pytest.mark.parametrize("kind", WRONG_PLACES)
@pytest.mark.parametrize("verb", READERS)
def test_a_wrong_path_is_an_error_with_a_remedy(tmp_path: Path, verb: str, kind: str) -> None:
    path = make_place(kind, tmp_path)
    out = said(verb, path)
    assert any(word in out for word in ("next", "Usage", "damaged"))
    said(verb, path, "--json")


@pytest.mark.parametrize("kind", ["a file", "below a file", "a link to itself", "a pipe", "a name with a zero"])
@pytest.mark.parametrize("verb", ["bench io", "bench tune", "bench --probe"])
def test_a_path_that_cannot_be_measured_is_an_error(tmp_path: Path, verb: str, kind: str) -> None:
    said(*verb.split(), make_place(kind, tmp_path), status=(2,))


FLAGS = [("--frobnicate",), ("-x",), ("--step",), ("--step", "one"), ("--step", "1.5"), ("a", "b", "c"), ("--json=3",)]


@pytest.mark.parametrize(("verb", "flags"), [
    (verb, flags) for verb in (*VERBS, "demo", "") for flags in FLAGS
    if (verb, flags) != ("ls", ("a", "b", "c"))  # which takes several stores
])
def test_a_wrong_flag_is_told_with_the_usage(verb: str, flags: tuple[str, ...]) -> None:
    assert "Error" in said(*verb.split(), *flags, status=(2,))


@pytest.mark.parametrize("step", ["-1", "0", "3", str(10**15), str(10**16), str(10**30)])
@pytest.mark.parametrize("verb", ["show", "verify"])
def test_a_step_that_is_not_there_is_told(checkpoint: Path, verb: str, step: str) -> None:
    said(verb, checkpoint.parent, "--step", step)
    said(verb, checkpoint, "--step", step)


@pytest.mark.parametrize("verb", ["ls", "show", "verify"])
@pytest.mark.parametrize("file", ["manifest.json", "index.safetensors", "objects.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("put", ["nothing", "a directory", "a link", "a pipe", "zeros"])
def test_a_file_that_is_something_else_is_told(checkpoint: Path, verb: str, file: str, put: str) -> None:
    path = checkpoint / file
    size = path.stat().st_size
    path.unlink()
    if put == "a directory":
        path.mkdir()
    elif put == "a link":
        path.symlink_to("/dev/zero")
    elif put == "a pipe":
        os.mkfifo(path)
    elif put == "zeros":
        path.write_bytes(bytes(size))
    out = said(verb, checkpoint.parent, status=(0, 1, 2))
    assert verb != "verify" or "damaged" in out or "next" in out


@pytest.fixture
def odd(store: Path) -> Path:
    """A sound checkpoint whose names and values a terminal does not like."""
    with fs.Checkpointer(store) as checkpointer:
        state = {
            "weight[/]": torch.ones(2), "\x1b[2Jred": torch.ones(2), "\u2603": torch.ones(2), "[bold]x": {"a": 1},
            "values": {"huge": 10**6000, "lone": "\ud800", "nan": float("nan"), ("a", 1): 2, 10**5000: 1, "\udcff": 2},
        }
        checkpointer.save(1, state).committed.result()
    return store


@pytest.mark.parametrize("verb", READERS)
def test_odd_names_and_values_are_shown_and_not_obeyed(odd: Path, verb: str) -> None:
    assert "\x1b" not in said(verb, odd, status=(0,))
    said(verb, odd, "--json", status=(0,))


def test_a_writer_that_looks_like_markup_is_shown_as_it_is(checkpoint: Path) -> None:
    edit_manifest(checkpoint, lambda m: m.update(writer="[/] me", created="[red]now") or m["io"].update(backend="[/b]"))
    out = said("show", checkpoint, status=(0,))
    assert "[/] me" in out
    assert "[red]now" in out
    assert "[/b]" in out


# A whole process


def run(*args: object, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "flowstone", *map(str, args)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120, "check": False} | options
    return subprocess.run(command, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_lacks_a_name_is_given_its_escape(odd: Path, encoding: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    for verb in READERS:
        done = run(verb, odd, env=environment)
        assert (done.returncode, done.stderr) == (0, b""), verb
    done = run("show", odd, "--json", env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u2603" in done.stdout


@pytest.mark.parametrize("flag", [(), ("--json",)])
def test_standard_output_on_a_full_disk_is_told(checkpoint: Path, flag: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = run("ls", checkpoint.parent, *flag, stdout=full)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"the system refused: No space left on device" in done.stderr


def test_a_closed_standard_output_ends_quietly(checkpoint: Path) -> None:
    for redirect in (">&-", ">&- 2>&-", "| true"):
        line = f"'{sys.executable}' -m flowstone ls '{checkpoint.parent}' {redirect}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, timeout=120, check=False)
        assert b"Traceback" not in done.stderr, redirect
        assert b"Exception ignored" not in done.stderr, redirect


@pytest.fixture
def read_only(checkpoint: Path) -> Iterator[Path]:
    """A store on a file system that takes no writes."""
    parent = checkpoint.parent
    for command in (["mount", "--bind", str(parent), str(parent)], ["mount", "-o", "remount,ro,bind", str(parent)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            subprocess.run(["umount", "--lazy", str(parent)], capture_output=True, check=False)
            pytest.skip(f"a mount that is read-only was refused: {done.stderr.strip()}")
    yield parent
    subprocess.run(["umount", "--lazy", str(parent)], check=True)


def test_a_read_only_mount_is_listed_shown_and_verified_and_not_measured(read_only: Path) -> None:
    for verb in READERS:
        said(verb, read_only, status=(0,))
    for verb in ("bench tune", "bench io"):
        assert "ead-only file system" in said(*verb.split(), read_only, status=(2,)), verb
    said("bench", "--probe", read_only, status=(0, 2))
    said("demo", "--small", "--directory", read_only / "demo", status=(1, 2))


@pytest.mark.parametrize("flag", ["--json", "--csv", "--html"])
@pytest.mark.parametrize("file", ["nowhere/out.json", "directory.json"])
def test_a_report_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, flag: str, file: str
) -> None:
    (tmp_path / "directory.json").mkdir()
    assert "cannot write a file" in said("bench", "io", tmp_path, "--quick", flag, tmp_path / file, status=(2,))
    assert [path.name for path in tmp_path.iterdir()] == ["directory.json"]
