"""Credentials as for other programs, and requests that a bucket refuses: each error names the remedy."""

from __future__ import annotations

import builtins
import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import flowstone as fs
from flowstone.errors import ArgumentError, FrameworkError, StorageError
from flowstone.store.objects.client import RetryPolicy
from flowstone.store.objects.store import ObjectStore
from object_server import Server

BRIEF = RetryPolicy(budget_s=0.3, request_s=5, first_delay_s=0.01, delay_s_max=0.05)


@pytest.fixture
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment without keys, whose home directory, which is returned, is empty."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def by_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    del home
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return "of-environment"


def by_session(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-session")
    return f"{by_environment(home, monkeypatch)} of-session"


def by_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    del monkeypatch
    (home / ".aws").mkdir()
    text = "[default]\naws_access_key_id=of-default\naws_secret_access_key=secret\n"
    (home / ".aws/credentials").write_text(text + text.replace("default", "named"))
    return "of-default"


def by_named_profile(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    by_files(home, monkeypatch)
    monkeypatch.setenv("AWS_PROFILE", "named")
    return "of-named"


def by_file_of_another_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    by_files(home, monkeypatch)
    (home / ".aws/credentials").rename(home / "keys")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "keys"))
    return "of-default"


def environment_before_profile(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    by_named_profile(home, monkeypatch)
    return by_environment(home, monkeypatch)


def without_any(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    by_files(home, monkeypatch)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    return ""


@pytest.mark.parametrize("way", [
    by_environment, by_session, by_files, by_named_profile, by_file_of_another_name, environment_before_profile,
    without_any,
])
def test_requests_are_signed_with_the_credentials_that_other_programs_would_take(
    url: str, server: Server, nothing_given: Path, monkeypatch: pytest.MonkeyPatch,
    way: Callable[[Path, pytest.MonkeyPatch], str],
) -> None:
    pytest.importorskip("boto3")
    expected = way(nothing_given, monkeypatch)
    server.keys()
    assert ObjectStore(url).names() == ()
    assert server.keys() == {expected}


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"])
def test_each_variable_for_an_endpoint_is_taken(
    url: str, server: Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(name, server.url)
    server.requests()
    assert ObjectStore(url, patience=BRIEF).names() == ()
    assert len(server.requests()) == 1


def test_a_profile_that_does_not_exist_is_named(nothing_given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    by_files(nothing_given, monkeypatch)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ArgumentError, match="'nobody'"):
        fs.open("s3://bucket/run")


def test_a_profile_without_boto3_says_what_to_install(nothing_given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_named_profile(nothing_given, monkeypatch)
    real = builtins.__import__

    def without(name: str, *more: object, **how: object) -> object:
        if name == "boto3":
            raise ImportError(name)
        return real(name, *more, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FrameworkError, match="'named'") as caught:
        fs.open("s3://bucket/run")
    assert "pip install boto3" in str(caught.value.facts["next"])


# What a bucket refuses


def test_a_token_that_expires_in_mid_save_fails_that_save_and_says_so(url: str, server: Server) -> None:
    with fs.Checkpointer(ObjectStore(url, patience=BRIEF), on_error="continue") as ckpt:
        ckpt.save(1, {"x": np.zeros(3_000_000)}).committed.result(60)
        server.fail(share=1, kinds=("expired",), only="part")
        with pytest.raises(StorageError) as caught:
            ckpt.save(2, {"x": np.ones(3_000_000)}).committed.result(60)
        assert caught.value.errno == errno.EACCES
        assert "expired" in str(caught.value.facts["next"])
        server.fail(share=0)  # as if a role's credentials were renewed
        ckpt.save(3, {"x": np.full(3_000_000, 3.0)}).committed.result(60)
    assert fs.open(url).step == 3
    assert fs.open(url, 1).verify().sound


@pytest.mark.parametrize(("kind", "says"), [
    ("unknown key", "does not know these credentials"), ("malformed", "AWS_REGION to eu-west-7"),
])
def test_keys_and_regions_that_are_wrong_are_told_apart(url: str, server: Server, kind: str, says: str) -> None:
    server.fail(share=1, kinds=(kind,))
    with pytest.raises(StorageError) as caught:
        ObjectStore(url, patience=BRIEF).names()
    assert says in str(caught.value.facts["next"])


@pytest.mark.parametrize(("only", "method", "says"), [
    ("list", "", "refused: list"), ("conditional", "PUT", "refused: write"),
])
def test_permission_for_a_part_of_what_a_store_needs_is_refused_at_the_first_save(
    url: str, server: Server, only: str, method: str, says: str
) -> None:
    """To write but not to list; to read and list, but not to write."""
    server.fail(share=1, kinds=("denied",), only=only, method=method)
    with fs.Checkpointer(ObjectStore(url, patience=BRIEF)) as ckpt:
        with pytest.raises(StorageError) as caught:
            ckpt.save(1, {"x": np.zeros(3)})
        assert caught.value.errno == errno.EACCES
        assert says in str(caught.value.facts["next"])
