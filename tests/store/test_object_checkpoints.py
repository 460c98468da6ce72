"""Checkpoints in a bucket: the full life of a training state, two jobs at once, and jobs that are killed."""

from __future__ import annotations

import importlib.util
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from contract import write_rows
from obstore.store import MemoryStore

import flowstone as fs
from flowstone import _native
from flowstone.errors import BudgetError, LockedError, StepExistsError, StorageError
from flowstone.store.base import FilePlan
from flowstone.store.objects.store import ObjectStore
from flowstone.store.objects.uploads import PART_BYTES_MIN, PARTS_MAX, in_order, part_bytes
from object_server import Server
from thread_names import inventory, live
from warm_start import warm_start

JOB = str(Path(__file__).parent / "bucket_job.py")


def training(seed: int) -> dict[str, object]:
    """A model of several parts of an upload, whose optimizer has stepped, and what is captured early beside it."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(1500, 1500)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 1500)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "average": torch.randn(3_000_000), "epoch": seed}


def tensors(state: dict[str, object]) -> list[torch.Tensor]:
    model, optimizer, average = state["model"], state["optimizer"], state["average"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(average, torch.Tensor)
    slots = [slot for slots in optimizer.state.values() for slot in slots.values() if isinstance(slot, torch.Tensor)]
    return [*(parameter.detach() for parameter in model.parameters()), *slots, average]


def assert_same(record: dict[str, object], other: dict[str, object]) -> None:
    for a, b in zip(tensors(record), tensors(other), strict=True):
        assert torch.equal(a, b)
    assert record["epoch"] == other["epoch"]


def test_what_loads_from_a_bucket_is_what_was_saved(url: str, server: Server) -> None:
    state = training(1)
    with fs.Checkpointer(url, keep=2) as ckpt:
        assert ckpt.latest() is None
        for step in (1, 2, 3):
            state["epoch"] = step
            ckpt.save(step, state).committed.result(60)
        assert ckpt.latest().step == 3  # type: ignore[union-attr]
    again = training(2)
    with fs.Checkpointer(url) as ckpt:
        assert ckpt.load(again).step == 3
    assert_same(again, state)
    store = ObjectStore(url)
    assert [name for name in store.names() if name.startswith("step-")] == ["step-00000002", "step-00000003"]
    found = fs.open(url)
    assert found.verify().sound
    assert found.objects["epoch"] == 3
    assert np.array_equal(found.read("average", framework="numpy"), state["average"].numpy())  # type: ignore[attr-defined]
    assert server.uploads(url) == []


def test_a_load_and_a_save_make_few_requests(url: str, server: Server) -> None:
    """However many steps there are: each request is a round trip, and what is asked twice is paid twice."""
    state: dict[str, object] = {"x": np.arange(100_000.0), "epoch": 1}
    with fs.Checkpointer(url) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state).committed.result(60)
        server.requests()
        ckpt.save(4, state).committed.result(60)
        assert len(server.requests()) <= 14  # the last one, a list, comes before or after `committed`
    with fs.Checkpointer(url) as ckpt:
        server.requests()
        ckpt.load(state)
        made = server.requests()
    assert len(made) <= 10, made
    assert not any("step-0000000" in arena for arena in made if "step-00000004" not in arena), made
    data = [name for name in made if name.startswith("GET") and "rank-00000" in name]
    assert len(data) == 2, "the header and the tensor"


def test_requests_of_saves_and_loads_are_as_many_as_the_limits_say(url: str, server: Server) -> None:
    text = " ".join(Path(__file__).parents[2].joinpath("docs/BUCKETS.md").read_text().split())
    saves = r"the first save makes (\d+) requests .*? each later save (\d+)\. "
    match = re.search(saves + r".*? of one rank: (\d+) requests in two", text)
    assert match is not None
    first, later, load = map(int, match.groups())
    has_boto3 = importlib.util.find_spec("boto3") is not None
    small, large = ({"x": np.arange(elements, dtype=float)} for elements in (100_000, 2_500_000))  # 1 part, 3 parts
    server.requests()
    with fs.Checkpointer(ObjectStore(url, lease_s=600)) as ckpt:
        for step, (state, expected) in enumerate(
            [(small, first + has_boto3 + 1), (small, later + 1), (large, later + 3 + 2)], 1
        ):
            ckpt.save(step, state).committed.result(60)
            ckpt._saves.sole_writer.drain()
            made = server.requests()
            assert len(made) == expected, (step, made)
    with fs.Checkpointer(url) as ckpt:
        server.requests()
        ckpt.load({"x": np.zeros_like(large["x"])})
        made = server.requests()
    assert len(made) == load + 3, made


@pytest.mark.parametrize("compress", ["max", "derived"])
def test_what_an_encoder_makes_shorter_goes_there_too(url: str, compress: str) -> None:
    state = training(1)
    state["copy"] = state["average"].to(torch.bfloat16)  # type: ignore[attr-defined]
    options = fs.EngineOptions(compress=compress)  # type: ignore[arg-type]
    with fs.Checkpointer(url, engine=options) as ckpt:
        ckpt.save(1, state).committed.result(60)
    again = training(2) | {"copy": torch.zeros(3_000_000, dtype=torch.bfloat16)}
    with fs.Checkpointer(url) as ckpt:
        ckpt.load(again)
    assert_same(again, state)
    assert torch.equal(again["copy"], state["copy"])  # type: ignore[arg-type]
    assert fs.open(url).verify().sound


def test_a_rewind_sets_newer_steps_aside_and_a_step_is_never_saved_twice(url: str) -> None:
    with fs.Checkpointer(url) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": np.full(5, step)}).committed.result(60)
        with pytest.raises(StepExistsError):
            ckpt.save(2, {"x": np.zeros(5)})
        ckpt.load({"x": np.zeros(5, int)}, step=1)
        ckpt.rewind(1)
        assert any(name.startswith(".superseded-00000002-") for name in ObjectStore(url).names())
        ckpt.save(2, {"x": np.full(5, 7)}).committed.result(60)
        state = {"x": np.zeros(5, int)}
        assert ckpt.load(state).step == 2
    assert state["x"].tolist() == [7] * 5


def test_a_journal_in_a_bucket_is_refused_by_name(url: str) -> None:
    with pytest.raises(fs.ArgumentError, match="every_step"):
        fs.Checkpointer(url, every_step=True)


def test_each_thread_of_a_bucket_is_in_the_inventory(url: str) -> None:
    names: set[str] = set()
    start = threading.Thread.start

    def seen(thread: threading.Thread) -> None:
        start(thread)
        names.update([re.sub(r"[_-]\d+$", "", thread.name)], live().values())

    state = training(1)
    before = set(live().values())
    with mock.patch.object(threading.Thread, "start", seen), fs.Checkpointer(url) as ckpt:
        ckpt.save(1, state).committed.result(60)
        ckpt.load(state)
    assert {"flowstone-lease", "flowstone-upload", "flowstone-download", "flowstone-heads"} <= names
    assert names - before <= inventory(), f"not in docs/ARCHITECTURE.md: {names - before - inventory()}"
    left = {name for name in live().values() if name.startswith("flowstone-")} - before
    assert left <= {"flowstone-log", "flowstone-act"}, f"outlive the Checkpointer: {left}"


def test_a_second_job_is_refused_while_the_first_one_lives(url: str) -> None:
    with fs.Checkpointer(url) as first, fs.Checkpointer(url) as second:
        first.save(1, {"x": np.zeros(5)}).committed.result(60)
        with pytest.raises(LockedError, match="cannot save into"):
            second.save(2, {"x": np.zeros(5)})


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, JOB, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("tensors", ["0", "3000000"])
def test_of_two_jobs_that_commit_one_step_at_once_one_wins_and_the_other_is_told(url: str, tensors: str) -> None:
    """Neither sees the other's lease; with tensors they meet at the segment, without at the manifest."""
    ObjectStore(url).make_directory()
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
    if tensors != "0":
        assert (checkpoint.read("x", framework="numpy") == winner).all()


def resume_after_kills(url: str, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    reported = 0
    with warm_start(JOB):
        for _ in range(kills):
            job = start("train", url, "1000")
            assert job.stdout is not None
            began = int(job.stdout.readline().split()[1])
            assert began >= reported, "a committed step is lost"
            for _ in range(draw.randrange(3)):
                reported = int(job.stdout.readline().split()[1])
            try:
                job.wait(draw.random() * 0.3)
            except subprocess.TimeoutExpired:
                job.send_signal(signal.SIGKILL)
            rest = job.communicate()[0].split()  # what it said before it died
            reported = max([reported, *map(int, rest[1::2])])
        last = start("train", url, "1")
        text, _ = last.communicate(timeout=120)
    assert last.returncode == 0, text
    assert int(text.split()[1]) >= reported
    assert fs.open(url).verify().sound


def test_a_job_that_is_killed_resumes_from_the_bucket_bit_for_bit(url: str) -> None:
    resume_after_kills(url, kills=3, seed=1)


@pytest.mark.soak
def test_a_job_that_is_killed_a_hundred_times_resumes_each_time(url: str) -> None:
    resume_after_kills(url, kills=100, seed=2)


def test_parts_are_few_enough_for_any_segment_and_long_enough_for_s3() -> None:
    for size in (1, PART_BYTES_MIN, 70 << 30, 5 << 40):
        length = part_bytes(size)
        assert length >= PART_BYTES_MIN > 5 << 20
        assert -(-size // length) <= PARTS_MAX + 1 <= 10_000


def test_windows_that_are_captured_before_those_in_front_of_them_are_kept_apart() -> None:
    windows = [(0, 40, 50), (1, 0, 9), (0, 0, 10), (0, 10, 30), (0, 30, 40)]
    assert in_order(windows, 0) == ([(0, 10), (10, 30), (30, 40), (40, 50)], {40})
    assert in_order(windows, 1) == ([(0, 9)], set())


def test_a_budget_that_holds_no_part_is_refused_with_numbers(url: str) -> None:
    store = ObjectStore(url)
    arena = _native.Arena(budget_bytes=4 << 20, block_bytes=2 << 20)
    rows = write_rows([0], [0], [np.zeros(10, np.uint8)])
    with pytest.raises(BudgetError) as caught:
        store.write([FilePlan("segment", 16 << 20)], rows, arena)
    assert (caught.value.facts["expected"], caught.value.facts["found"]) == ("at least 8388608 bytes", "4194304 bytes")
    assert not store.exists("segment")
    arena.close()


def test_unfinished_uploads_of_dead_writers_go_with_the_next_one_and_those_of_others_stay(
    url: str, server: Server
) -> None:
    client = pytest.importorskip("boto3").client("s3")
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    for key in (f"{prefix}/step-00000001/rank-00000.safetensors", f"{prefix}-other/file"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    assert len(server.uploads(url)) == len(server.uploads(f"{url}-other")) == 1
    with fs.Checkpointer(url) as ckpt:
        ckpt.save(1, {"x": 1}).committed.result(60)
    assert (server.uploads(url), server.uploads(f"{url}-other")) == ([], [f"{prefix}-other/file"])


def test_a_store_that_ignores_conditions_is_refused_at_the_first_save() -> None:
    class Careless:
        """Overwrites what is there, whatever it is told."""

        def __init__(self) -> None:
            self.inner = MemoryStore()

        def put(self, path: str, data: bytes, **_: object) -> object:
            return self.inner.put(path, data)

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

    with fs.Checkpointer(ObjectStore(Careless(), location="careless")) as ckpt:  # type: ignore[arg-type]
        with pytest.raises(StorageError, match="cannot commit a checkpoint") as caught:
            ckpt.save(1, {"x": 1})
        assert "If-None-Match" in str(caught.value.facts["reason"])
