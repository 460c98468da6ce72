"""Stores on servers through fsspec: S3 through s3fs, and SFTP through paramiko."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowstone as fs
from flowstone.errors import StorageError
from flowstone.store.objects.store import ObjectStore
from object_server import BUCKET, Server, serving
from store.contract import StoreContract

pytest.importorskip("s3fs", reason="make test-integrations installs it")
asyncssh = pytest.importorskip("asyncssh", reason="make test-integrations installs it")
pytest.importorskip("paramiko", reason="make test-integrations installs it")

_numbers = itertools.count()


class _AnyPassword(asyncssh.SSHServer):  # type: ignore[name-defined, misc]
    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return (username, password) == ("me", "secret")


@pytest.fixture(scope="module")
def sftp_port() -> Iterator[int]:
    """An SFTP server on loopback, of this machine's files."""
    loop, ports = asyncio.new_event_loop(), []
    begun = threading.Event()

    async def begin() -> None:
        server = await asyncssh.listen(
            "127.0.0.1", 0, server_factory=_AnyPassword, sftp_factory=True,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        )
        ports.append(server.get_port())
        begun.set()

    def run() -> None:
        loop.create_task(begin())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(30)
    yield ports[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with serving() as server:
        yield server


class OfTimesInSeconds(StoreContract):
    def test_a_stamp_is_another_one_once_the_file_is(self, store: Any) -> None:
        """Where times are of seconds: once its bytes are others."""
        store.put("file", b"1")
        first = store.stamp("file")
        assert store.stamp("file") == first
        store.remove("file")
        store.put("file", b"2")
        assert store.stamp("file") != first


class TestThroughS3fs(OfTimesInSeconds):
    @pytest.fixture(autouse=True)
    def _one_server(self, s3: Server) -> None:
        pass

    def open_store(self, root: Path) -> ObjectStore:
        return ObjectStore(f"fsspec+s3://{BUCKET}{root}", location=str(root))


class TestOverSftp(OfTimesInSeconds):
    @pytest.fixture(autouse=True)
    def _one_server(self, sftp_port: int) -> None:
        self.port = sftp_port

    def open_store(self, root: Path) -> ObjectStore:
        return ObjectStore(f"fsspec+sftp://me:secret@127.0.0.1:{self.port}{root}", location=str(root))


@pytest.fixture(params=["s3", "sftp"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"fsspec+s3://{BUCKET}/run-{next(_numbers)}"
    return f"fsspec+sftp://me:secret@127.0.0.1:{request.getfixturevalue('sftp_port')}{tmp_path}/run"


def test_checkpoints_are_saved_kept_set_aside_and_verified(url: str) -> None:
    state: dict[str, Any] = {"x": np.zeros(3_000_000), "step": 0}
    with fs.Checkpointer(url, keep=2) as ckpt:
        for step in (1, 2, 3):
            state = {"x": np.full(3_000_000, float(step)), "step": step}
            ckpt.save(step, state).committed.result(120)
        ckpt.rewind(2)
        assert ckpt.load(state).step == 2
        assert (state["x"] == 2).all()
    assert fs.open(url).verify().sound
    names = ObjectStore(url).names()
    assert not [name for name in names if "part" in name or name.startswith((".saving", ".deleting"))]


def test_an_upload_that_fails_leaves_no_part(s3: Server) -> None:
    url = f"fsspec+s3://{BUCKET}/run-{next(_numbers)}"
    with fs.Checkpointer(url, on_error="continue") as ckpt:
        ckpt.save(1, {"x": np.zeros(3_000_000)}).committed.result(60)
        s3.fail(share=1, kinds=("denied",), only="part")
        with pytest.raises(StorageError, match="cannot upload"):
            ckpt.save(2, {"x": np.ones(3_000_000)}).committed.result(60)
        s3.fail(share=0)
    assert s3.uploads() == []
    assert fs.open(url).step == 1


def test_a_wrong_password_is_told_and_not_shown(sftp_port: int) -> None:
    with pytest.raises(StorageError, match="cannot connect") as caught:
        ObjectStore(f"fsspec+sftp://me:wrong-one@127.0.0.1:{sftp_port}/run")
    assert "wrong-one" not in str(caught.value)
    assert "Authentication" in str(caught.value.facts["reason"])
