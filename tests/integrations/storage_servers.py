"""Object stores of others on loopback: Ceph's gateway for S3, on a cluster of one node in memory, and Azurite.

    python tests/integrations/storage_servers.py radosgw COMMAND...

runs a command with one of them in its environment: `s3://bucket` of the gateway, `az://bucket` of Azurite.
`make test-integrations` installs them. Each is a context that gives what its clients need in their environment; both
end with it, and leave nothing. `missing` says why one cannot be started here.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

BUCKET = "bucket"
PROJECT = Path(__file__).resolve().parent.parent.parent
AZURITE = Path(sys.prefix) / "servers/node_modules/.bin/azurite-blob"
CEPH = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph")
LOOPBACK = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
_ACCOUNT = "devstoreaccount1"
# The account that every Azurite has, and its key, which its documentation gives.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_START_S = 120

_CEPH_CONF = """[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{port}
auth cluster required = none
auth service required = none
auth client required = none
ms bind msgr2 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = {folder}
admin socket = {folder}/$cluster-$name.asok
log file = {folder}/$name.log
pid file = {folder}/$name.pid
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
mon allow pool size one = true
mon max pg per osd = 1000
osd crush chooseleaf type = 0
osd class update on start = false
osd crush update on start = false
rgw frontends = beast endpoint=127.0.0.1:{gateway}
rgw run sync thread = false
"""


def missing(server: str) -> str:
    """Why "radosgw" or "azurite" cannot be started here; "" if it can."""
    if server == "azurite":
        return "" if AZURITE.exists() else f"{AZURITE} is missing: npm could not install it"
    absent = [name for name in CEPH if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (packages radosgw, ceph-mon, ceph-osd)" if absent else ""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class _Processes:
    """Programs that run until this is closed; what they say goes into files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._running = folder, list[subprocess.Popen[bytes]]()

    def start(self, *command: str) -> None:
        with (self._folder / f"{Path(command[0]).name}.txt").open("wb") as log:
            self._running.append(subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            ))

    def run(self, *command: str) -> str:
        return subprocess.run(
            command, check=True, timeout=_START_S, capture_output=True, text=True, cwd=self._folder
        ).stdout

    def close(self) -> None:
        for process in reversed(self._running):
            os.killpg(process.pid, signal.SIGKILL)  # what it holds is in memory
            process.wait()


def _answer(request: urllib.request.Request) -> int:
    """The status of what a server answers, once it listens."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _START_S
    while True:
        try:
            status: int = opener.open(request, timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return status


@contextlib.contextmanager
def radosgw(folder: Path) -> Iterator[str]:
    """A URL below which a test has its stores, in a bucket of Ceph's gateway, and this process' environment for it."""
    port, gateway = _free_ports(2)
    fsid, disk = uuid.uuid4(), str(uuid.uuid4())
    (folder / "ceph.conf").write_text(_CEPH_CONF.format(fsid=fsid, port=port, gateway=gateway, folder=folder))
    for name in ("mon", "osd"):
        (folder / name).mkdir()
    address = f"http://127.0.0.1:{gateway}"
    conf = ("-c", "ceph.conf")
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    with contextlib.closing(_Processes(folder)) as ceph:
        ceph.run("monmaptool", "--create", "--fsid", str(fsid), "--addv", "a", f"v1:127.0.0.1:{port}", "monmap")
        ceph.run("ceph-mon", *conf, "--mkfs", "-i", "a", "--monmap", "monmap")
        ceph.start("ceph-mon", *conf, "-i", "a", "-f")
        ceph.run("ceph", *conf, "osd", "new", disk)
        ceph.run("ceph", *conf, "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=here")
        ceph.run("ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", disk)
        ceph.start("ceph-osd", *conf, "-i", "0", "-f")
        ceph.run(
            "radosgw-admin", *conf, "user", "create", "--uid=test", "--display-name=test", "--access-key=test",
            "--secret-key=test",
        )
        ceph.start("radosgw", *conf, "-n", "client.rgw", "-f")
        _answer(urllib.request.Request(address))
        with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": address, **keys, **LOOPBACK}):
            _make_bucket()
            yield f"s3://{BUCKET}"


def _make_bucket() -> None:
    import boto3

    boto3.client("s3").create_bucket(Bucket=BUCKET)


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """The same of Azurite."""
    (port,) = _free_ports(1)
    address = f"http://127.0.0.1:{port}"
    with contextlib.closing(_Processes(folder)) as processes:
        processes.start(
            str(AZURITE), "--silent", "--inMemoryPersistence", "--blobPort", str(port), "--skipApiVersionCheck",
            "--disableTelemetry",
        )
        assert _answer(_new_container(address)) == 201
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": address, **LOOPBACK,
        }
        with mock.patch.dict(os.environ, environment):
            yield f"az://{BUCKET}"


def _new_container(address: str) -> urllib.request.Request:
    """Signed as Azure's "Authorize with Shared Key" has it."""
    headers = {"x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + "\n" * 12 + signed + f"/{_ACCOUNT}/{_ACCOUNT}/{BUCKET}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()).decode()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{signature}"
    return urllib.request.Request(f"{address}/{_ACCOUNT}/{BUCKET}?restype=container", method="PUT", headers=headers)


SERVERS = {"radosgw": radosgw, "azurite": azurite}


def main() -> int:
    server, *command = sys.argv[1:]
    if missing(server):
        print(missing(server), file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, SERVERS[server](Path(folder)):
        return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main())
