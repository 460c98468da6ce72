"""Exit statuses of all verbs: 0: no problem, 1: damage or a difference, 2: an error of use or of the system."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli import app
from forge import flip, place_of

SOUND, DAMAGE, ERROR = 0, 1, 2
TABLE = [
    ("ls run", SOUND), ("show run", SOUND), ("verify run", SOUND), ("du run", SOUND), ("diff run run", SOUND),
    ("export run new", SOUND), ("pack run new", SOUND), ("import run new --step 9", SOUND), ("ls run copy", SOUND),
    ("agent --status", SOUND), ("--version", SOUND),
    # Of two steps the newer one has a damaged manifest, or a damaged tensor, or lacks a file.
    ("ls torn", DAMAGE), ("show torn", DAMAGE), ("verify torn", DAMAGE), ("diff torn run", DAMAGE),
    ("export torn new", DAMAGE), ("pack torn new", DAMAGE), ("import torn new --step 9", DAMAGE),
    ("ls run torn", DAMAGE), ("verify bad", DAMAGE), ("export bad new", DAMAGE), ("export bad new --to torch", DAMAGE),
    ("pack bad new", DAMAGE), ("import bad new --step 9", DAMAGE), ("diff bad run", DAMAGE), ("verify less", DAMAGE),
    ("show less", DAMAGE), ("import half.pt new", DAMAGE), ("diff run other", DAMAGE),
    *((f"{verb} {path}", ERROR) for verb in ("ls", "show", "verify", "du") for path in ("nowhere", "file", "empty/a")),
    ("show run --step 55", ERROR), ("verify run --step 55", ERROR), ("du run --step 55", ERROR),
    ("diff run run --step-a 55", ERROR), ("export run new --step 55", ERROR), ("pack run new --step 55", ERROR),
    *((f"ls {paths}", ERROR) for paths in (
        "run nowhere", "nowhere run", "run file", "file run", "run full", "full run", "run empty/a", "empty nowhere",
        "run memory://none", "run other", "run run/step-00000001", "run s3://b/../x",
    )),
    ("ls empty run", SOUND), ("ls run run", SOUND), ("ls run less", DAMAGE), ("ls run torn nowhere", DAMAGE),
    *((f"{verb} nowhere run", ERROR) for verb in ("diff", "export", "pack", "import")), ("flush nowhere new", ERROR),
    ("verify run nowhere", ERROR), ("du run nowhere", ERROR), ("show run nowhere", ERROR),
    ("diff run nowhere", ERROR), ("diff run run --section none", ERROR),
    ("export run full", ERROR), ("export run file", ERROR), ("export run file/new", ERROR), ("export run loop", ERROR),
    ("export run loop/new", ERROR), ("export nowhere new", ERROR), ("export run new --section none", ERROR),
    ("export run new --to onnx", ERROR), ("export run new --dtype int3", ERROR), ("export run new --skip ''", ERROR),
    ("export run new --rules nothing", ERROR), ("export run new --budget 1kB", ERROR),
    ("pack run full", ERROR), ("pack run loop/new", ERROR), ("pack nowhere new", ERROR),
    ("import run run", ERROR), ("import run file", ERROR), ("import run loop", ERROR), ("import nowhere new", ERROR),
    ("import file new", ERROR), ("flush run new", ERROR), ("flush memory://none new", ERROR), ("frobnicate", ERROR),
    ("ls", ERROR), ("ls run --frobnicate", ERROR), ("show run --step x", ERROR), ("bench tune nowhere", ERROR),
    ("bench io nowhere --quick", ERROR), ("demo --directory full", ERROR), ("ls s3://b/../x", ERROR),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    for name, value in (("run", 1.0), ("other", 2.0)):
        with fs.Checkpointer(root / name) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, {"model": {"w": torch.full((40_000,), value)}})
    for name in ("torn", "bad", "less", "copy"):
        shutil.copytree(root / "run", root / name)
    newest = "step-00000002"
    (root / "torn" / newest / "manifest.json").write_text("{")
    flip(*place_of(root / "bad" / newest, "model.w"))
    (root / "less" / newest / "index.safetensors").unlink()
    torch.save({"w": torch.ones(9)}, root / "half.pt")
    (root / "half.pt").write_bytes((root / "half.pt").read_bytes()[:300])
    (root / "empty").mkdir()
    (root / "full").mkdir()
    for name in ("file", "full/mine"):
        (root / name).write_text("mine")
    (root / "loop").symlink_to("loop")
    return root


@pytest.mark.parametrize(("line", "status"), TABLE, ids=[line for line, _ in TABLE])
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_verb_ends_with_the_status_that_the_table_says(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, status: int, as_json: bool
) -> None:
    monkeypatch.setenv("FLOWSTONE_AGENT_DIR", str(tmp_path / "agent"))
    monkeypatch.chdir(tmp_path)
    for place in places.iterdir():
        if place.is_dir():
            shutil.copytree(place, tmp_path / place.name)
        elif place.is_file():
            shutil.copy(place, tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    words = [word.strip("'") for word in line.split()]
    flags = ["--json"] * (as_json and words[0] not in ("bench", "--version", "frobnicate"))
    done = CliRunner().invoke(app, [*words, *flags])
    assert done.exit_code == status, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("fault", ["ValueError('ours')", "OSError(28, 'full')", "BrokenPipeError(32, 'gone')"])
def test_a_fault_of_the_program_itself_is_no_damage(fault: str) -> None:
    program = (
        "import importlib\nmodule = importlib.import_module('flowstone.cli.app')\n"
        f"def fail(**_): raise {fault}\nmodule.app = fail\nmodule.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == ERROR, done.stderr
