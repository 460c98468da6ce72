"""The verbs `flowstone export` and `flowstone import`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli.app import app


def test_export_and_import_say_what_they_did(saved: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(saved), str(tmp_path / "hf"), "--skip", "model.small.*"])
    assert done.exit_code == 0, done.output
    assert "11 tensors" in done.stdout
    assert "tied: head" in done.stdout
    assert "left out: model.small.0" in done.stdout
    done = CliRunner().invoke(app, ["import", str(tmp_path / "hf"), str(tmp_path / "run"), "--step", "3", "--json"])
    report = json.loads(done.stdout)
    assert (report["step"], report["kind"], len(report["tensors"])) == (3, "safetensors", 11)
    assert fs.open(tmp_path / "run").step == 3


def test_sizes_and_types_are_read_as_people_write_them(saved: Path, tmp_path: Path) -> None:
    options = ["--shard-size", "3MB", "--dtype", "bf16", "--budget", "64MiB", "--json"]
    done = CliRunner().invoke(app, ["export", str(saved), str(tmp_path / "hf"), *options])
    report = json.loads(done.stdout)
    assert "model.safetensors.index.json" in report["files"]
    assert "embed" in report["cast"]
    bad = CliRunner().invoke(app, ["export", str(saved), str(tmp_path / "x"), "--shard-size", "many"])
    assert bad.exit_code == 2
    assert "is not a size" in bad.output


def test_errors_are_told_as_text_and_as_json(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").touch()
    done = CliRunner().invoke(app, ["export", str(saved), str(tmp_path / "hf")])
    assert done.exit_code == 2
    assert "the directory is not empty" in done.output
    done = CliRunner().invoke(app, ["import", str(tmp_path / "nowhere"), str(tmp_path / "run"), "--json"])
    assert json.loads(done.stdout)["error"] == "NotAStoreError"
