"""Any other object in the place of a checkpoint's file is refused at once, and the attempt leaves nothing behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from strangers import FORMATS, STRANGE, limited

import flowstone as fs
from mutants import trouble_with


def files_of(source: Path) -> list[Path]:
    paths = [source] if source.is_file() else [path for path in sorted(source.rglob("*")) if path.is_file()]
    return [path for path in paths if path.name != "lock"]


@pytest.mark.parametrize("kind", [name for name in FORMATS if name != "flowstone"])
def test_a_file_of_no_kind_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    (tmp_path / "made").mkdir()
    source = FORMATS[kind](tmp_path / "made")
    rules = fs.Skip("odd.*")  # what that one has to be refused for
    fs.import_checkpoint(source, tmp_path / "sound", rules=rules)
    for file in files_of(source):
        for key, put in STRANGE.items():
            shutil.rmtree(tmp_path / "harmed", ignore_errors=True)
            copied = tmp_path / "harmed" / source.name
            if source.is_dir():
                shutil.copytree(source, copied)
            else:
                copied.parent.mkdir()
            place = copied if file == source else copied / file.relative_to(source)
            place.unlink(missing_ok=True)
            put(place)
            try:
                with limited():
                    fs.import_checkpoint(copied, tmp_path / "run", rules=rules)
            except fs.FlowstoneError:
                left = set(os.listdir(tmp_path / "run")) if (tmp_path / "run").exists() else set()
                assert left <= {"flowstone.json", "flowstone.lock"}, (file, key)
            except Exception as error:
                raise AssertionError(f"{key} as {file.name}") from error
            else:  # what is no part of it: a configuration, a file that only says which of several is the latest
                shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("kind", STRANGE)
def test_a_checkpoint_of_ours_with_a_file_of_no_kind_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    source = FORMATS["flowstone"](tmp_path)
    for file in files_of(source):
        shutil.rmtree(tmp_path / "harmed", ignore_errors=True)
        shutil.copytree(source, tmp_path / "harmed")
        place = tmp_path / "harmed" / file.relative_to(source)
        place.unlink()
        STRANGE[kind](place)
        with limited():
            actual = trouble_with(next((tmp_path / "harmed").glob("step-*")))
        assert not [name for name in actual if not name.startswith("load: MismatchError")], file


@pytest.mark.parametrize("put", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("act", [
    lambda path, place: fs.open(path), lambda path, place: fs.import_checkpoint(path, place / "run"),
    lambda path, place: fs.diff(path, path), lambda path, place: fs.export(path, place / "hf"),
], ids=["open", "import", "diff", "export"])
@pytest.mark.parametrize("name", ["x", "x.safetensors", "x.pt"])
def test_a_path_of_no_kind_is_refused_at_once(
    tmp_path: Path, put: Callable[[Path], object], act: Callable[[Path, Path], object], name: str
) -> None:
    put(tmp_path / name)
    with limited(), pytest.raises(fs.FlowstoneError):
        act(tmp_path / name, tmp_path)
    assert not {"run", "hf"} & set(os.listdir(tmp_path))
