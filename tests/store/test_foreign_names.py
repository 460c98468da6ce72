"""Files of other programs in a store, under any name: ignored, reported, and never removed."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli.app import app
from flowstone.errors import FrameworkError, NoCheckpointError
from flowstone.store.objects.store import ObjectStore
from object_server import BUCKET, Server

STATE = {"w": np.arange(6)}
REFUSED = (
    "/x", "./x", "../x", "\x01", "step-00000001//x", "step-00000001/\x02", "step-00000001/..", "step-00000009//x",
)
"""Of objects below a store: names with which obstore lists nothing."""
ODD = ("é", "%", "a%2fb", "*?[#", "a//b", "step-00000002/", "step-00000001/", "step-00000001/a/b", "flowstone.json/x")


@pytest.fixture
def s3(server: Server) -> Any:
    return boto3.client("s3", endpoint_url=server.url, region_name="us-east-1")


def put(s3: Any, url: str, name: str) -> str:
    key = f"{url.removeprefix(f's3://{BUCKET}/')}/{name}"
    s3.put_object(Bucket=BUCKET, Key=key, Body=b"" if name.endswith("/") else b"theirs")
    return key


def saved(place: object, step: int, **options: Any) -> None:
    with fs.Checkpointer(place, **options) as ckpt:  # type: ignore[arg-type]
        ckpt.save(step, STATE)


@pytest.mark.parametrize("name", [*REFUSED, *ODD])
def test_a_foreign_object_of_whatever_name_changes_nothing_for_a_store(url: str, s3: Any, name: str) -> None:
    saved(url, 1)
    key = put(s3, url, name)
    with fs.Checkpointer(url) as ckpt:
        newest = ckpt.latest()
        assert newest is not None
        assert newest.step == 1
        assert ckpt.load({"w": np.zeros(6, np.int64)}).step == 1
        ckpt.save(2, STATE)
    for verb in ("ls", "show", "verify", "du"):
        result = CliRunner().invoke(app, [verb, url])
        assert result.exit_code == 0, result.output
    saved(url, 3, keep=1)  # removes step 1, in which some of them are
    assert fs.open(url).step == 3
    with pytest.raises(NoCheckpointError):
        fs.open(url, step=1)
    s3.head_object(Bucket=BUCKET, Key=key)


@pytest.mark.parametrize("name", ["x", "/x", "a/b", ""])
def test_a_rewind_sets_a_step_aside_and_leaves_what_is_foreign_in_it(url: str, s3: Any, name: str) -> None:
    for step in (1, 2):
        saved(url, step)
    key = put(s3, url, f"step-00000002/{name}")
    with fs.Checkpointer(url) as ckpt:
        ckpt.rewind(1)
        assert fs.open(url).step == 1
        ckpt.save(2, STATE)
    assert fs.open(url, step=2).verify().sound
    s3.head_object(Bucket=BUCKET, Key=key)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_file_of_ours_is_told_once_by_its_name(
    url: str, s3: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(url, 1)
    put(s3, url, name)
    store = ObjectStore(url)
    directory = name.partition("/")[0] if name.startswith("step-") else ""
    for _ in range(2):
        assert "rank-00000.safetensors" in store.names("step-00000001")
        assert "step-00000001" in store.names()
        store.names(directory)
    reported = [record.getMessage() for record in caplog.records if "ignoring objects" in record.getMessage()]
    assert len(reported) == 1
    own = name.removeprefix("step-00000001/").removeprefix("step-00000009/")
    assert repr(own.partition("/")[0] + "/" * ("/" in own)) in reported[0]


def test_a_first_save_goes_beside_foreign_objects(url: str, s3: Any) -> None:
    put(s3, url, "/x")
    put(s3, url, "")  # as consoles make a folder
    with fs.Checkpointer(url) as ckpt:
        assert ckpt.latest() is None
        ckpt.save(1, STATE)
    assert fs.open(url).verify().sound


def test_without_boto3_the_error_names_the_object_and_what_to_do(
    url: str, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(url, 1)
    put(s3, url, "/x")
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "boto3":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FrameworkError, match="has a name that obstore refuses") as caught:
        ObjectStore(url).names()
    assert "//" in str(caught.value.facts["reason"])
    assert "pip install boto3" in str(caught.value.facts["next"])


@pytest.mark.parametrize("name", ["journal-00000001-0123456789abcdef", "a\nb", "step-00000003"])
def test_a_foreign_file_in_a_directory_changes_nothing_for_a_store(tmp_path: Path, name: str) -> None:
    saved(tmp_path, 1)
    (tmp_path / name).write_text("theirs")
    assert fs.open(tmp_path).verify().sound
    with fs.Checkpointer(tmp_path) as ckpt:
        assert ckpt.load({"w": np.zeros(6, np.int64)}).step == 1
        ckpt.save(2, STATE)
    for verb in ("ls", "show", "verify", "du"):
        assert CliRunner().invoke(app, [verb, str(tmp_path)]).exit_code == 0
    assert (tmp_path / name).read_text() == "theirs"
