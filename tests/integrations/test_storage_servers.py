"""Checkpoints in other vendors' object stores: Ceph's gateway for S3, and Azurite."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from storage_servers import SERVERS, missing

import flowstone as fs
from flowstone.store.objects.client import Client
from flowstone.store.objects.store import ObjectStore
from store.contract import StoreContract
from warm_start import warm_start

JOB = str(Path(__file__).resolve().parent.parent / "store/bucket_job.py")
_numbers = itertools.count()


@pytest.fixture(scope="module", params=SERVERS)
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    reason = missing(request.param) if os.environ.get("FLOWSTONE_INTEGRATIONS") else "make test-integrations starts it"
    if reason:
        pytest.skip(reason)
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as url:
        yield url


@pytest.fixture
def url(bucket: str) -> str:
    """Of a store that nobody else uses."""
    return f"{bucket}/run-{next(_numbers)}"


class TestObjectStoreOfOthers(StoreContract):
    @pytest.fixture(autouse=True)
    def _one_server(self, bucket: str) -> None:
        self.bucket = bucket

    def open_store(self, root: Path) -> ObjectStore:
        return ObjectStore(f"{self.bucket}{root}", location=str(root))


def values(step: int) -> dict[str, object]:
    """Three parts of an upload, and small ones."""
    draw = np.random.default_rng(step)
    return {"large": draw.random(2_500_000), "small": draw.random(100), "step": step}


def assert_same(record: dict[str, object], other: dict[str, object]) -> None:
    assert record.keys() == other.keys()
    for name, value in record.items():
        assert np.array_equal(np.asarray(value), np.asarray(other[name])), name


def test_checkpoints_are_saved_kept_loaded_set_aside_and_verified(url: str) -> None:
    with fs.Checkpointer(url, keep=2) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, values(step)).committed.result(60)
    store = ObjectStore(url)
    assert [name for name in store.names() if name.startswith("step-")] == ["step-00000002", "step-00000003"]
    for step in (2, 3):
        assert fs.open(url, step).verify().sound
    with fs.Checkpointer(url) as ckpt:
        state = {**values(0), "step": 0}
        assert ckpt.load(state, step=2).step == 2
        assert_same(state, values(2))
        ckpt.rewind(2)
        ckpt.save(3, values(7)).committed.result(60)
        assert ckpt.load(state).step == 3
    assert_same(state, values(7))
    names, states = store.names(), dict(fs.open(url).stream("large"))
    assert any(name.startswith(".superseded-00000003-") for name in names)
    assert np.array_equal(states["large"].numpy(), np.asarray(values(7)["large"]))


def test_a_put_to_a_name_that_is_taken_is_refused_by_the_server_itself(url: str) -> None:
    store = ObjectStore(url)
    store.lock("a job")  # a server that ignores conditions is refused here
    store.unlock()
    client = store.client
    assert isinstance(client, Client)
    tag = client.put_new("file", b"1", "token")
    assert client.replace("file", b"2", "\"another\"") is None
    assert client.replace("file", b"3", tag) is not None
    assert store.read("file") == b"3"


@pytest.mark.parametrize("tensors", ["0", "3000000"])
def test_of_two_jobs_that_commit_one_step_at_once_one_wins_and_the_other_is_told(url: str, tensors: str) -> None:
    with fs.Checkpointer(url) as ckpt:
        ckpt.save(1, {"x": 0}).committed.result(60)
    with warm_start(JOB):
        jobs = [start("commit", url, str(number), tensors) for number in (1, 2)]
        for job in jobs:
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"
        for job in jobs:
            assert job.stdin is not None
            job.stdin.write("go\n")
            job.stdin.flush()
        outputs = [job.communicate(timeout=120)[0].split() for job in jobs]
    assert sorted(line[0] for line in outputs) == ["committed", "refused"], outputs
    winner = next(number for number, item in zip((1, 2), outputs, strict=True) if item[0] == "committed")
    checkpoint = fs.open(url)
    assert (checkpoint.step, checkpoint.objects["job"]) == (2, winner)
    assert checkpoint.verify().sound


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, JOB, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_job_that_is_killed_resumes_bit_for_bit_and_its_unfinished_uploads_go(url: str) -> None:
    reported = 0
    with warm_start(JOB):
        for kill in range(3):
            job = start("train", url, "1000")
            assert job.stdout is not None
            began = int(job.stdout.readline().split()[1])
            assert began >= reported, "a committed step is lost"
            for _ in range(kill + 1):
                reported = int(job.stdout.readline().split()[1])
            job.send_signal(signal.SIGKILL)
            rest = job.communicate()[0].split()
            reported = max([reported, *map(int, rest[1::2])])
        last = start("train", url, "1")
        text, _ = last.communicate(timeout=120)
    assert last.returncode == 0, text
    assert int(text.split()[1]) >= reported
    assert fs.open(url).verify().sound


def test_a_bucket_that_does_not_exist_is_named(bucket: str) -> None:
    url = f"{bucket.replace('bucket', 'no-such-bucket')}/run"
    with pytest.raises(fs.StorageError, match="no-such-bucket") as caught:
        ObjectStore(url).names()
    assert "create the bucket" in str(caught.value.facts["next"])
