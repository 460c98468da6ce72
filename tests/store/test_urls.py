"""URLs of stores: two URLs are two stores, the displayed URL is the one used, and no secret is displayed."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli.app import app
from flowstone.errors import ArgumentError
from flowstone.store.base import canonical_location
from flowstone.store.objects.client import RetryPolicy, open_bucket
from flowstone.store.objects.store import ObjectStore
from flowstone.store.urls import object_url, without_secrets
from object_server import BUCKET, Server

STATE = {"w": np.arange(6)}
NO_NAMES = {
    "fragment": ("run#1", "'#'"), "query": ("run?versionId=1", "'?'"), "empty query": ("run?", "'?'"),
    "parent": ("a/../run", "'..'"), "parent at the end": ("run/..", "'..'"), "itself": ("a/./run", "'.'"),
    "empty part": ("a//run", "empty"), "two slashes at the end": ("run//", "empty"), "line end": ("run\n", r"'\n'"),
    "nul": ("ru\0n", r"'\x00'"), "delete": ("ru\x7fn", r"'\x7f'"), "surrogate": ("ru\udc80n", "UTF-8"),
}
"""Of paths in a bucket; and what the error has to name."""
FLOWS: dict[str, Callable[[str, Path], object]] = {
    "Checkpointer": lambda url, run: fs.Checkpointer(url),
    "open": lambda url, run: fs.open(url),
    "tier": lambda url, run: fs.Checkpointer([run, url]),
    "path of a striped store": lambda url, run: fs.Striped([run, url]),
    "export": lambda url, run: fs.export(run, url),
    "pack": lambda url, run: fs.pack(run, url),
    "import": lambda url, run: fs.import_checkpoint(run, url, step=2),
    "diff": lambda url, run: fs.diff(run, url),
    "store": lambda url, run: ObjectStore(url),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with fs.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, STATE)
    return tmp_path / "run"


@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs", "az", "abfss", "fsspec+memory"])
@pytest.mark.parametrize("kind", NO_NAMES)
def test_a_path_with_what_is_no_name_is_refused_by_it(scheme: str, kind: str) -> None:
    path, says = NO_NAMES[kind]
    with pytest.raises(ArgumentError) as caught:
        object_url(f"{scheme}://bucket/{path}")
    assert says in caught.value.message


@pytest.mark.parametrize("flow", FLOWS)
def test_every_call_refuses_it_before_a_request_is_made(flow: str, run: Path, server: Server) -> None:
    server.requests()
    for path in ("exp#1", "exp?x", "exp/../other"):
        with pytest.raises(ArgumentError, match="is not the URL of a store"):
            FLOWS[flow](f"s3://bkt/{path}", run)
    assert server.requests() == []


@pytest.mark.parametrize("verb", ["ls", "show", "verify", "du"])
def test_the_command_line_refuses_it_too(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "s3://bkt/exp#1"])
    assert result.exit_code != 0
    assert "'#'" in result.output + result.stderr


@pytest.mark.parametrize(("url", "shown"), [
    ("s3://AKIA:se/cr+et@bucket/run", "s3://AKIA:***@bucket/run"),
    ("s3://AKIA:secret@bucket/run", "s3://AKIA:***@bucket/run"),
    ("gs://secret@bucket/run", "gs://***@bucket/run"),
    ("az://container/run?sv=2024&sig=secret", "az://container/run?***"),
    ("abfss://container:secret@account.dfs.core.windows.net/run", "abfss://container:***@account.dfs.core.windows.net/run"),
    ("fsspec+sftp://me:se/cret@host/run", "fsspec+sftp://me:***@host/run"),
    ("fsspec+sftp://me:se?cret@host/run", "fsspec+sftp://me:***@host/run"),
    ("ftp://me:secret@host/run", "ftp://me:***@host/run"),
    ("https://secret@host/run", "https://***@host/run"),
])
def test_credentials_in_a_url_are_refused_and_not_shown(url: str, shown: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        fs.Checkpointer(url)
    assert shown in caught.value.message
    assert "cret" not in str(caught.value)


def test_a_password_that_fsspec_takes_is_never_shown() -> None:
    assert without_secrets("fsspec+sftp://me:p@ss@host:22/run@3") == "fsspec+sftp://me:***@host:22/run@3"
    url = object_url("fsspec+sftp://me:p@ss@host:22/run@3")
    assert url is not None
    assert url.shown == "fsspec+sftp://me:***@host:22/run@3"


def test_an_escape_is_refused_since_programs_differ_on_it() -> None:
    with pytest.raises(ArgumentError, match="%20"):
        object_url("s3://bucket/a%20b")


@settings(max_examples=200, deadline=None)
@given(st.lists(
    st.text(st.sampled_from(string.printable + "äé€😀"), min_size=1, max_size=8), min_size=1, max_size=3,
))
def test_the_prefix_that_is_used_is_the_one_that_is_shown(parts: list[str]) -> None:
    try:
        url = object_url(f"s3://bucket/{'/'.join(parts)}")
    except ArgumentError:
        return
    assert url is not None
    for store in open_bucket(url, RetryPolicy()):
        assert f"s3://bucket/{store.prefix or ''}".rstrip("/") == url


def test_what_is_saved_by_a_url_lies_under_that_very_name(url: str) -> None:
    names = ("exp%1", "exp 1", "exp~1", "é", "a+b&c")
    for step, name in enumerate(names):
        with fs.Checkpointer(f"{url}/{name}/") as ckpt:
            ckpt.save(step, STATE)
    bucket = open_bucket(f"s3://{BUCKET}", RetryPolicy())[0]
    for step, name in enumerate(names):
        bucket.head(f"{url.removeprefix(f's3://{BUCKET}/')}/{name}/step-{step:08d}/manifest.json")
        assert fs.open(f"{url}/{name}").step == step


def test_the_place_of_a_file_system_is_shown_as_it_is_used(tmp_path: Path) -> None:
    with fs.Checkpointer(fs.Fsspec(fsspec.filesystem("file"), f"{tmp_path}/run")) as ckpt:
        location = ckpt.save(1, STATE).committed.result().path.removesuffix("/step-00000001")
    assert fs.open(location).step == 1


@pytest.mark.parametrize("path", ["a/../b", "a//b", "a\nb"])
def test_a_path_of_a_file_system_with_what_is_no_name_is_refused(path: str) -> None:
    memory: Any = fsspec.filesystem("memory")
    with pytest.raises(ArgumentError, match="is not the URL of a store"):
        fs.Fsspec(memory, path)


ONE_PLACE = {
    "S3": ["s3://bucket/run", "s3a://bucket/run", "S3://bucket/run/", "fsspec+s3://bucket/run", "fsspec+s3a://bucket/run"],
    "Google": ["gs://bucket/run", "fsspec+gs://bucket/run", "fsspec+gcs://bucket/run"],
    "Azure": [
        *(f"{scheme}://container/run" for scheme in ("az", "azure", "adl", "abfs", "abfss")), "fsspec+abfs://container/run",
    ],
    "Azure with its account": [
        "abfss://c@account.dfs.core.windows.net/run", "abfs://c@account.blob.core.windows.net/run",
        "az://c@Account.dfs.core.windows.net/run",
    ],
    "SSH": ["fsspec+sftp://host/run", "fsspec+ssh://host/run"],
}


@pytest.mark.parametrize("urls", ONE_PLACE.values(), ids=ONE_PLACE.keys())
def test_a_place_is_one_store_however_its_scheme_is_called(urls: list[str]) -> None:
    actual = [object_url(url) for url in urls]
    assert len({canonical_location(str(url)) for url in actual}) == 1
    assert len({url for url in actual if url is not None and not url.startswith("fsspec+")}) <= 1
    other = object_url(urls[0].replace("run", "ran"))
    assert canonical_location(str(other)) != canonical_location(str(actual[0]))


def test_obstore_takes_the_name_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for urls in (ONE_PLACE["S3"][:3], ONE_PLACE["Azure"][:-1], ONE_PLACE["Azure with its account"]):
        stores = [open_bucket(str(object_url(url)), RetryPolicy())[0] for url in urls]
        assert all(store == stores[0] for store in stores)
        assert stores[0].prefix == "run"


@pytest.mark.parametrize("flow", [
    lambda value, other: fs.Checkpointer([value, other]), lambda value, other: fs.Striped(["first", value, other]),
], ids=["tiers", "paths of a striped store"])
def test_a_store_under_two_names_is_given_twice(
    flow: Callable[[str, str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.chdir(tmp_path)
    for first, other in (("s3://bkt/run", "s3a://bkt/run"), (str(tmp_path / "run"), f"fsspec+file://{tmp_path}/run")):
        with pytest.raises(ArgumentError, match=r"the same store|twice"):
            flow(first, other)


def test_a_second_object_under_another_name_waits_for_the_saves_in_flight_of_the_first(server: Server) -> None:
    first = fs.Checkpointer(f"s3://{BUCKET}/cell")
    first.save(1, STATE)
    with fs.Checkpointer(f"s3a://{BUCKET}/cell") as second:
        newest = second.latest()
        assert newest is not None
        assert newest.step == 1
    first.close()


@pytest.mark.parametrize("url", ["s3://bucket/run", "s3:/bucket/run", "http://me:secret@host/run", "memory://run"])
def test_memory_is_flushed_to_a_directory_and_not_to_one_that_is_called_as_a_url(url: str) -> None:
    with pytest.raises(ArgumentError, match="is a URL") as caught:
        fs.NodeMemory("run", flush_to=url)
    assert "secret" not in str(caught.value)
