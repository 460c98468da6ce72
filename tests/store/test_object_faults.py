"""Faults of a bucket: errors, resets, lost answers, truncated bodies, delayed lists."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from obstore.exceptions import PreconditionError
from obstore.store import MemoryStore

import flowstone as fs
from flowstone import _native
from flowstone.errors import LockedError, StorageError
from flowstone.store import holders
from flowstone.store.base import FilePlan, Pace
from flowstone.store.objects import lease
from flowstone.store.objects.client import Client, RetryPolicy
from flowstone.store.objects.lease import ObjectLease
from flowstone.store.objects.store import ObjectStore
from object_server import BUCKET, KINDS, Server

QUICK = RetryPolicy(budget_s=60, request_s=20, first_delay_s=0.01, delay_s_max=0.05)
LEASE_S = 300.0  # no thread of a test renews it
BRIEF = RetryPolicy(budget_s=0.3, request_s=5, first_delay_s=0.01, delay_s_max=0.05)


def values(step: int) -> dict[str, np.ndarray]:
    """Two parts of an upload, and small ones."""
    draw = np.random.default_rng(step)
    return {"large": draw.random(1_300_000), "small": draw.random(100), "step": np.array(step)}


def assert_whole(url: str, step: int) -> None:
    """That the checkpoint of a step is what was saved."""
    state: dict[str, object] = {name: np.zeros_like(value) for name, value in values(step).items()}
    with fs.Checkpointer(ObjectStore(url, patience=QUICK)) as ckpt:
        assert ckpt.load(state, step=step).step == step
    for name, value in values(step).items():
        assert np.array_equal(state[name], value), (step, name)  # type: ignore[arg-type]


def campaign(url: str, server: Server, *, faults: int, seed: int) -> None:
    """Save until so many requests have failed. What was reported committed is there, and nothing is torn, ever."""
    committed, refused, failed, step, round_ = [], 0, 0, 0, 0
    while failed < faults:
        server.fail(share=0.2, seed=seed + round_, kinds=KINDS)
        with fs.Checkpointer(ObjectStore(url, patience=QUICK), on_error="continue", keep=4) as ckpt:
            for _ in range(4):
                step += 1
                try:
                    ckpt.save(step, values(step)).committed.result(120)
                except fs.FlowstoneError:
                    refused += 1
                else:
                    committed.append(step)
            if committed:
                assert_whole(url, committed[-1])
        failed += sum(server.failed().values())
        round_ += 1
        server.fail(share=0)
        there = [name for name in ObjectStore(url).names() if name.startswith("step-")]
        for name in there:
            if ObjectStore(url).exists(f"{name}/manifest.json"):
                assert fs.open(url, int(name[5:])).verify().sound
        assert fs.open(url).step >= committed[-1], "what was committed is lost"
    assert len(committed) > refused, (committed, refused)
    with fs.Checkpointer(url) as ckpt:
        ckpt.save(step + 1, values(step + 1)).committed.result(60)
    assert server.uploads(url) == [], "an upload that could not be aborted went on being there"


def test_nothing_is_lost_or_torn_where_every_fifth_request_fails(url: str, server: Server) -> None:
    campaign(url, server, faults=40, seed=1)


@pytest.mark.soak
def test_nothing_is_lost_or_torn_in_a_thousand_faults(url: str, server: Server) -> None:
    campaign(url, server, faults=1_000, seed=100)


@pytest.mark.parametrize("kind", ["500", "slow down", "429", "reset before", "reset after", "truncated", "delayed"])
def test_each_kind_of_fault_is_outlasted_by_every_verb(url: str, server: Server, kind: str) -> None:
    server.fail(share=0.4, seed=3, kinds=(kind,))
    store = ObjectStore(url, patience=QUICK)
    store.make_directory()
    store.make_directory("a")
    for number in range(3):
        store.put(f"a/{number}", bytes([number]) * 1000)
    assert store.names("a") == ("0", "1", "2")
    assert store.read("a/1") == b"\1" * 1000
    store.rename("a/1", "a/one")
    store.lock("a job")
    store.check_lock()
    store.unlock()
    for name in ("0", "2", "one"):
        store.remove(f"a/{name}")
    store.remove("a")
    assert store.names() == ("flowstone.lock",)
    assert server.failed()["reset after" if kind == "truncated" else kind] + server.failed()[kind] > 0
    store.close()


def test_a_put_whose_answer_was_lost_has_succeeded_and_one_of_another_job_has_not(url: str, server: Server) -> None:
    store = ObjectStore(url, patience=QUICK)
    server.fail(share=0.7, seed=1, kinds=("reset after",), method="PUT")
    for number in range(8):
        store.put(f"file-{number}", b"ours")
    assert server.failed()["reset after"] > 0
    with pytest.raises(StorageError) as caught:
        store.put("file-0", b"theirs")
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(StorageError) as caught:
        store.put("file-0", b"ours")  # the same bytes, but not of this call
    assert caught.value.errno == errno.EEXIST
    assert store.read("file-0") == b"ours"


def test_an_outage_ends_with_an_error_that_says_so_within_the_budget(url: str, server: Server) -> None:
    store = ObjectStore(url, patience=BRIEF)
    server.fail(share=1, kinds=("slow down",))
    began = time.monotonic()
    with pytest.raises(StorageError, match="cannot list") as caught:
        store.names()
    assert caught.value.errno == errno.EBUSY
    assert "busy" in str(caught.value.facts["next"])
    with pytest.raises(StorageError) as caught:
        store.put("file", b"1")
    assert "unknown" in str(caught.value.facts["outcome"])
    assert time.monotonic() - began < 10
    server.fail(share=0)
    assert store.names() == ()


def test_a_save_into_a_bucket_that_fails_meanwhile_fails_and_leaves_the_step_before(url: str, server: Server) -> None:
    with fs.Checkpointer(ObjectStore(url, patience=BRIEF), on_error="continue") as ckpt:
        ckpt.save(1, values(1)).committed.result(60)
        server.fail(share=1, kinds=("500",), method="PUT")
        with pytest.raises(StorageError):
            ckpt.save(2, values(2)).committed.result(60)
        server.fail(share=0)
        assert ckpt.latest().step == 1  # type: ignore[union-attr]
        ckpt.save(3, values(3)).committed.result(60)
    assert_whole(url, 1)
    assert_whole(url, 3)
    assert server.uploads(url) == []


@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [
        ("denied", errno.EACCES, "list, read, write and delete"), ("other region", errno.EREMOTE, "AWS_REGION"),
        ("not implemented", errno.ENOTSUP, "conditional puts"), ("quota", errno.ENOSPC, "raise the quota"),
    ],
)
def test_a_refusal_says_what_to_do(url: str, server: Server, kind: str, code: int, says: str) -> None:
    server.fail(share=1, kinds=(kind,))
    with pytest.raises(StorageError) as caught:
        ObjectStore(url, patience=BRIEF).make_directory("a") if kind != "denied" else ObjectStore(url).names()
    assert caught.value.errno == code
    assert says in str(caught.value.facts["next"])


def test_a_bucket_that_does_not_exist_is_named(server: Server) -> None:
    for call in (
        lambda store: store.exists(), lambda store: store.names(), lambda store: store.make_directory("a"),
        lambda store: store.put("a", b"1"),
    ):
        with pytest.raises(StorageError, match="no-such-bucket") as caught:
            call(ObjectStore("s3://no-such-bucket/run", patience=BRIEF))
        assert "create the bucket" in str(caught.value.facts["next"])
    with pytest.raises(StorageError, match="no-such-bucket"):
        fs.open("s3://no-such-bucket/run")


def test_an_object_that_changed_behind_our_back_is_found_by_its_digest(url: str) -> None:
    with fs.Checkpointer(url) as ckpt:
        for step in (1, 2):
            ckpt.save(step, values(step)).committed.result(60)
    store = ObjectStore(url)
    path = "step-00000002/rank-00000.safetensors"
    content = bytearray(store.read(path))
    content[len(content) // 2] ^= 1
    store.client.once.put(path, bytes(content))
    assert not fs.open(url).inspect().sound
    with fs.Checkpointer(url) as ckpt, pytest.raises(fs.DamagedError):
        ckpt.load({name: np.zeros_like(value) for name, value in values(2).items()})
    assert_whole(url, 1)


def test_a_writer_that_stood_still_neither_replaces_nor_removes_what_the_next_one_has_written(url: str) -> None:
    """It is overtaken between its claim and the end of its upload: the next job sweeps its draft, and begins anew."""
    late = ObjectStore(url)
    late.make_directory()
    late.make_directory("step-00000001")
    path, source = "step-00000001/rank-00000.safetensors", np.zeros(12 << 20, np.uint8)
    arena = _native.Arena(budget_bytes=32 << 20, block_bytes=8 << 20)
    pace = Pace(blocks=1, bytes_per_s=1 << 20)  # its last window comes once it is expedited
    offset, length = np.array([0], np.uint64), np.array([source.nbytes], np.uint64)
    rows = _native.WriteExtents(
        file=np.zeros(1, np.uint32), offset=offset, length=length, address=np.array([source.ctypes.data], np.uint64),
        chunk=np.zeros(1, np.uint64), layout=np.full(1, -1, np.int64), layouts=[], chunks=12,
    )
    rows.mark_lazy(np.ones(1, bool))
    writing = late.write([FilePlan(path, source.nbytes)], rows, arena, pace)
    next_one = ObjectStore(url)
    next_one.remove(path)
    next_one.put(path, b"what the next job has written")
    writing.expedite()
    receipt = writing.receipt()
    assert isinstance(receipt.error, LockedError)
    with pytest.raises(StorageError, match="cannot remove") as caught:
        late.remove(path)
    assert caught.value.errno == errno.EPERM
    assert next_one.read(path) == b"what the next job has written"
    next_one.remove(path)
    arena.close()
    late.close()


# The lease


@pytest.fixture
def leases() -> Iterator[tuple[ObjectLease, ObjectLease]]:
    """Two of one store, as on two machines."""
    bucket = MemoryStore()
    pair = [ObjectLease(Client("a bucket", bucket, bucket, BRIEF), lease_s=LEASE_S) for _ in range(2)]
    yield pair[0], pair[1]
    for item in pair:
        item.release()


class Waits:
    """Stands for the clock of who waits for a lease: what happens meanwhile happens once for each sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
        self.now, self._meanwhile = 0.0, meanwhile
        monkeypatch.setattr(lease, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._meanwhile()


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process seems to run on another machine."""
    monkeypatch.setattr("flowstone.store.holders.machine_and_process", lambda: ("another machine", "1 1"))


def test_a_lease_that_is_renewed_elsewhere_is_not_taken(
    leases: tuple[ObjectLease, ObjectLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = leases
    first.acquire("the first")
    elsewhere(monkeypatch)
    waits = Waits(monkeypatch, lambda: first._renew(first._ended))
    with pytest.raises(LockedError, match="the first"):
        second.acquire("the second")
    assert waits.now < LEASE_S
    first.check()


def test_a_lease_that_is_held_is_renewed_again_and_again() -> None:
    bucket = MemoryStore()
    lease = ObjectLease(Client("a bucket", bucket, bucket, BRIEF), lease_s=0.04)
    lease.acquire("a job")
    deadline = time.monotonic() + 60
    while (actual := lease._find()[0]) is not None and actual.turn < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    lease.check()
    lease.release()


def test_a_lease_that_no_thread_can_renew_is_given_up_at_once(
    leases: tuple[ObjectLease, ObjectLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = leases

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        with pytest.raises(StorageError, match="cannot start a thread"):
            first.acquire("the first")
    assert second.acquire("the second"), "nobody has it"
    second.check()
    second.release()
    assert first.acquire("the first again")
    first.check()


def test_a_lease_that_nobody_renews_is_taken_after_its_time_and_the_first_one_is_told(
    leases: tuple[ObjectLease, ObjectLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = leases
    first.acquire("the first")
    first._ended.set()  # it stands still
    elsewhere(monkeypatch)
    waits = Waits(monkeypatch, lambda: None)
    second.acquire("the second")
    assert waits.now >= LEASE_S
    second.check()
    with pytest.raises(LockedError, match="the second has taken the lock since"):
        first.check()


def test_the_lease_of_a_process_of_this_machine_that_is_gone_is_taken_at_once(
    leases: tuple[ObjectLease, ObjectLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = leases
    here = holders.machine_and_process()
    monkeypatch.setattr("flowstone.store.holders.machine_and_process", lambda: (here[0], f"{2**22 - 1} 1"))
    first.acquire("the first")
    first._ended.set()
    waits = Waits(monkeypatch, lambda: None)
    second.acquire("the second")
    assert waits.now == 0


def test_an_object_in_the_place_of_the_lease_is_taken_over(leases: tuple[ObjectLease, ObjectLease]) -> None:
    first, _ = leases
    first._client.once.put("flowstone.lock", b"what somebody else has put there")
    first.acquire("the first")
    first.check()


class LikeCeph:
    """A bucket that tells tags as Ceph's gateway of version 16 does: with quotes, which it refuses in a condition; and
    none where an upload of several parts ends."""

    def __init__(self) -> None:
        self.inner = MemoryStore()

    def put(self, path: str, data: object, *, mode: object = "overwrite", **_: object) -> dict[str, object]:
        if isinstance(mode, dict):
            tag = str(mode["e_tag"])
            if tag.startswith('"'):
                raise PreconditionError("412 Precondition Failed")
            mode = {"e_tag": f'"{tag}"'}
        is_whole = isinstance(data, bytes)
        content = data if is_whole else b"".join(map(bytes, data))  # type: ignore[call-overload]
        put = self.inner.put(path, content, mode=mode, use_multipart=False)  # type: ignore[arg-type]
        return {**put, "e_tag": put["e_tag"] if is_whole else ""}

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def test_a_gateway_that_quotes_tags_here_and_not_there_is_a_store_like_any_other() -> None:
    bucket = LikeCeph()
    make = lambda: ObjectStore(bucket, location="a gateway")  # type: ignore[arg-type]  # noqa: E731
    with fs.Checkpointer(make(), keep=1) as ckpt:
        for step in (1, 2):
            ckpt.save(step, values(step)).committed.result(60)
    store = make()
    assert [name for name in store.names() if name.startswith("step-")] == ["step-00000002"]
    assert fs.open(store).verify().sound
    first, second = ObjectLease(make().client), ObjectLease(make().client)
    bucket.inner.delete("flowstone.lock")
    for item in (first, second):
        item.acquire("a job")
        item.check()
        item.release()
    client = make().client
    tag = client.tag("flowstone.lock")
    assert client.replace("flowstone.lock", b"mine", '"another"') is None
    assert client.tag("flowstone.lock") == tag


def test_the_bucket_of_the_server_is_that_of_the_urls(url: str) -> None:
    assert url.startswith(f"s3://{BUCKET}/")


def test_the_threads_of_a_job_are_woken_when_it_stops_and_miss_no_end() -> None:
    arena = _native.Arena(budget_bytes=8 << 20, block_bytes=2 << 20)
    engine = _native.Engine(backend="caller", queue_depth=4, request_bytes=arena.block_bytes, workers=1)
    source = np.zeros(10_000, np.uint8)
    rows = _native.WriteExtents(
        file=np.zeros(1, np.uint32), offset=np.zeros(1, np.uint64), length=np.array([source.nbytes], np.uint64),
        address=np.array([source.ctypes.data], np.uint64), chunk=np.zeros(1, np.uint64),
        layout=np.full(1, -1, np.int64), layouts=[], chunks=1,
    )
    before = engine.wakes
    job = engine.write(arena, [(_native.File(fd=7, path="a", alignment=1), 12_288)], rows)
    ((number, _, _, _, length, _),) = engine.take("write", (7, 8), 4, 60, before)
    job.cancel()
    stopped = engine.wakes
    assert stopped != before
    assert engine.take("write", (7, 8), 4, 1e6, before) == []  # at once, though it has stopped before this call
    assert not job.wait(0)
    engine.complete(number, length)
    assert job.wait(60)
    assert engine.take("write", (7, 8), 4, 1e6, stopped) == []
    engine.close()
    arena.close()
