"""The rates of saves and loads with an object store, compared with the store's own clients in the same run.

    PYTHONPATH=src python -m bench.objects [--bytes 256e6] [--rounds 3] [--url s3://bucket/prefix]

Without --url, an S3 server (moto's) is started on loopback, in a process of its own. With it, the server is the one
that AWS_ENDPOINT_URL and similar variables name. In each round these take turns: obstore uploads one object of that
many bytes in parts of 8 MiB, sixteen at once, and downloads it; boto3, if it is installed, does the same with its own
defaults; Flowstone saves one tensor of that many bytes, until it is committed, and loads it with digests verified.
Rates are in bytes per second; `ratio` is Flowstone's rate divided by that of the better client in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from statistics import median
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import flowstone as fs

PART_BYTES = 8 << 20
AT_ONCE = 16
BUCKET = "bench"


@contextlib.contextmanager
def local_server() -> Iterator[str]:
    """A URL in a bucket of our own server."""
    import obstore  # noqa: F401  (before the clock runs)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**os.environ, "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true"},
    )
    address = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_REGION": "us-east-1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }
    try:
        with mock.patch.dict(os.environ, environment):
            _make_bucket(address)
            yield f"s3://{BUCKET}/run"
    finally:
        process.terminate()
        process.wait()


def _make_bucket(address: str) -> None:
    headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=bench/20260101/us-east-1/s3/aws4_request"}
    for _ in range(200):
        try:
            urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT", headers=headers)).read()
            return
        except urllib.error.URLError:
            time.sleep(0.1)
    raise SystemExit("the server does not answer")


def timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def by_obstore(url: str, data: NDArray[np.uint8]) -> tuple[float, float]:
    """Seconds of an upload and of a download."""
    from obstore.store import from_url

    store = from_url(url, client_options={"allow_http": True})
    parts = [data[offset : offset + PART_BYTES] for offset in range(0, data.nbytes, PART_BYTES)]
    up = timed(lambda: store.put(
        "obstore", iter(parts), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=AT_ONCE
    ))
    target = np.empty_like(data)

    def fetch(offset: int) -> None:
        end = min(offset + PART_BYTES, data.nbytes)
        target[offset:end] = np.frombuffer(store.get_range("obstore", start=offset, end=end), np.uint8)

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(AT_ONCE) as executor:
        down = timed(lambda: list(executor.map(fetch, range(0, data.nbytes, PART_BYTES))))
    assert np.array_equal(target, data)
    return up, down


def by_boto3(url: str, data: NDArray[np.uint8]) -> tuple[float, float]:
    import boto3

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL"))
    up = timed(lambda: client.upload_fileobj(io.BytesIO(data), bucket, f"{prefix}/boto3"))
    target = io.BytesIO()
    down = timed(lambda: client.download_fileobj(bucket, f"{prefix}/boto3", target))
    assert target.getvalue() == data.tobytes()
    return up, down


def by_flowstone(url: str, data: NDArray[np.uint8]) -> tuple[float, float]:
    with fs.Checkpointer(f"{url}/{time.time_ns()}") as ckpt:
        ckpt.save(1, {"x": np.zeros(1)}).committed.result()  # creates store, lease and arena
        up = timed(lambda: ckpt.save(2, {"x": data}).committed.result())
        target = {"x": np.zeros_like(data)}
        down = timed(lambda: ckpt.load(target))
    assert np.array_equal(target["x"], data)
    return up, down


def measure(url: str, total_bytes: int, rounds: int) -> dict[str, object]:
    data = np.random.default_rng(1).integers(0, 256, total_bytes, np.uint8)
    ways = {"obstore": by_obstore, "flowstone": by_flowstone}
    if importlib.util.find_spec("boto3") is not None and url.startswith("s3://"):
        ways = {"boto3": by_boto3, **ways}
    rates: dict[str, dict[str, list[float]]] = {name: {"upload": [], "download": []} for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            for verb, seconds in zip(("upload", "download"), way(url, data), strict=True):
                rates[name][verb].append(total_bytes / seconds)
    record: dict[str, object] = {
        name: {verb: round(median(each)) for verb, each in verbs.items()} for name, verbs in rates.items()
    }
    record["ratio"] = {
        verb: round(median(
            own / max(rates[name][verb][number] for name in ways if name != "flowstone")
            for number, own in enumerate(rates["flowstone"][verb])
        ), 2) for verb in ("upload", "download")
    }
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=256e6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", help="of a prefix in a bucket; default: a server on loopback")
    given = parser.parse_args()
    with contextlib.nullcontext(given.url) if given.url else local_server() as url:
        print(json.dumps(measure(url, int(given.bytes), given.rounds), indent=2))


if __name__ == "__main__":
    main()
