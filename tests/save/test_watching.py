"""Exact detection: any write to memory that is not captured yet fails that save, by name."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import re
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import flowstone as fs
from flowstone import _native, cli
from flowstone.config import Watch
from flowstone.events.phases import Captured, Event
from flowstone.save.pacing import Captures
from flowstone.store.base import Pace

MIB, PAGE, HUGE = 1 << 20, 4096, 2 << 20
REFUSAL = _native.written_pages_refusal()
pytestmark = pytest.mark.skipif(bool(REFUSAL), reason=f"written pages are not told here: {REFUSAL}")


@pytest.fixture(autouse=True)
def slow() -> Iterator[None]:
    """The first request goes out, and nothing else is captured until a thread waits for it."""
    with mock.patch.object(Captures, "pace", return_value=Pace(blocks=1, bytes_per_s=1)):
        yield


def opened(path: Path, *, watch: Watch = "auto", **options: Any) -> fs.Checkpointer:
    engine = fs.EngineOptions(request_bytes=2 * MIB, watch=watch)
    return fs.Checkpointer(path, engine=engine, on_error="continue", **{"budget_bytes": 4 * MIB, **options})


class Held(nn.Module):
    """Parameters that are given."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.of = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])


def training(*tensors: torch.Tensor) -> dict[str, object]:
    model = Held(*(tensors or (torch.randn(1000, 701), torch.randn(3 * MIB // 4), torch.randn(333, 999))))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def parameters(state: dict[str, object]) -> list[nn.Parameter]:
    return list(state["model"].parameters())  # type: ignore[attr-defined]


class Pool:
    """A mapping in huge pages, where the system has them."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory[:] = b"\0" * len(self.memory)
        self.start = -ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) % HUGE

    def tensor(self, offset: int, count: int) -> torch.Tensor:
        made = torch.frombuffer(self.memory, dtype=torch.float32, count=count, offset=self.start + offset)
        return made.normal_()

    def huge_kib(self) -> int:
        """How much of it is in huge pages."""
        start, result = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), 0
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            head = line.split(maxsplit=1)[0]
            if "-" in head and not head.endswith(":"):
                low, high = (int(part, 16) for part in head.split("-"))
                inside = low < start + len(self.memory) and high > start
            elif inside and head == "AnonHugePages:":
                result += int(line.split()[1])
        return result


def faults() -> int:
    """Of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


# Who writes

Writer = Callable[[torch.Tensor, int], None]  # a byte of a contiguous tensor's memory


def by_data(tensor: torch.Tensor, position: int) -> None:
    tensor.data.view(-1).view(torch.uint8)[position] ^= 1


def by_numpy(tensor: torch.Tensor, position: int) -> None:
    tensor.detach().numpy().reshape(-1).view(np.uint8)[position] ^= 1


def by_another_library(tensor: torch.Tensor, index: int) -> None:
    ctypes.memset(tensor.data_ptr() + index, 255 ^ ctypes.c_uint8.from_address(tensor.data_ptr() + index).value, 1)


def by_a_row_in_place(tensor: torch.Tensor, position: int) -> None:
    with torch.no_grad():
        tensor.view(-1)[position // 4].add_(1)


def by_a_thread(tensor: torch.Tensor, position: int) -> None:
    thread = threading.Thread(target=by_data, args=(tensor, position))
    thread.start()
    thread.join()


def by_the_system(tensor: torch.Tensor, position: int) -> None:
    """A read of a file into the memory."""
    out, into = os.pipe()
    os.write(into, bytes([255 ^ ctypes.c_uint8.from_address(tensor.data_ptr() + position).value]))
    os.readv(out, [(ctypes.c_char * 1).from_address(tensor.data_ptr() + position)])
    os.close(out)
    os.close(into)


WRITERS: list[Writer] = [by_data, by_numpy, by_another_library, by_a_row_in_place, by_a_thread, by_the_system]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_one_byte_that_changes_before_its_capture_fails_that_save_by_name(tmp_path: Path, write: Writer) -> None:
    state, chance = training(), random.Random(write.__name__)
    with opened(tmp_path, keep=fs.Keep(last=1)) as checkpointer:
        checkpointer.save(0, state).committed.result()
        for step in range(1, 13):
            number = 1 + step % 2  # the first one's bytes may be captured already
            tensor = parameters(state)[number]
            size = tensor.nbytes
            choices = (0, size - 1, chance.randrange(size), chance.randrange(PAGE), size - 1 - chance.randrange(PAGE))
            save = checkpointer.save(step, state)
            assert not save.captured.done()
            write(tensor, choices[step % 5])
            checkpointer.fence()
            error = save.committed.exception(60)
            assert isinstance(error, fs.StateChangedError), (step, choices[step % 5])
            assert error.names == (f"model.of.{number}",)
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.step == 0
        before = [tensor.clone() for tensor in parameters(state)]
        checkpointer.save(99, state).committed.result().verify()
    assert all(torch.equal(fs.open(tmp_path).read(f"model.of.{index}"), tensor) for index, tensor in enumerate(before))


def test_a_neighbour_on_the_same_pages_may_be_written_all_the_time(tmp_path: Path) -> None:
    """Every parameter shares its first and last page with a buffer that is not saved."""
    memory = torch.zeros(4 * MIB // 4)
    starts = (5, 300_000, 640_000)
    lengths = (250_001, 300_003, 400_007)
    state = training(*(memory[start : start + length].normal_() for start, length in zip(starts, lengths, strict=True)))
    beside = [index for start, length in zip(starts, lengths, strict=True) for index in (start - 1, start + length)]
    view, done = memory.numpy(), threading.Event()

    def scribble() -> None:
        while not done.is_set():
            for index in beside:
                view[index] += 1

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        with opened(tmp_path, watch="exact", keep=fs.Keep(last=1)) as checkpointer:
            for step in range(20):
                saved = checkpointer.save(step, state).committed.result()
                assert saved.manifest.io.sampled_bytes == 0
    finally:
        done.set()
        thread.join()


def test_a_step_after_a_save_finds_nothing_protected(tmp_path: Path) -> None:
    state = training()
    with opened(tmp_path, watch="exact") as checkpointer:
        for step in range(4):
            save = checkpointer.save(step, state)
            if step == 2:
                by_data(parameters(state)[2], 12345)  # also a save that failed leaves nothing behind
            checkpointer.fence()
            for tensor in parameters(state):
                before = faults()
                tensor.detach().view(-1).view(torch.uint8).numpy()[::PAGE] ^= 1
                assert faults() - before < 8, "not one for each of its pages"
            assert (save.committed.exception(60) is None) == (step != 2)


def test_huge_pages_stay_whole_and_are_watched_exactly_by_default(tmp_path: Path) -> None:
    pool = Pool(96 * MIB)
    whole_kib = pool.huge_kib()
    if whole_kib < 90 * 1024:
        pytest.skip("no huge pages here")
    # Between them and at their ends lies what is not theirs.
    state = training(*(pool.tensor(index * 31 * MIB + 1000, 30 * MIB // 4 + 7) for index in range(3)))
    with opened(tmp_path, keep=fs.Keep(last=1)) as checkpointer:
        for step in range(3):
            save = checkpointer.save(step, state)
            checkpointer.fence()
            for tensor in parameters(state):
                tensor.data.add_(1)
            io = save.committed.result(60).manifest.io
            assert (io.exact_bytes, io.sampled_bytes) == (3 * (30 * MIB + 28), 0)
            assert pool.huge_kib() == whole_kib
        save = checkpointer.save(3, state)
        by_data(parameters(state)[2], 17 * MIB + 3)
        checkpointer.fence()
        error = save.committed.exception(60)
        assert isinstance(error, fs.StateChangedError)
        assert error.names == ("model.of.2",)


# What a training script changes between a save and its capture without moving a version counter

Change = Callable[[dict[str, object], int, random.Random], str]  # of the tensor of that number; returns its name


def a_row_through_data(state: dict[str, object], number: int, chance: random.Random) -> str:
    rows = parameters(state)[number].data
    rows[chance.randrange(len(rows))] += 1
    return f"model.of.{number}"


def a_row_by_numpy(state: dict[str, object], number: int, chance: random.Random) -> str:
    rows = parameters(state)[number].detach().numpy()
    rows[chance.randrange(len(rows))] *= 1.5
    return f"model.of.{number}"


def a_row_of_a_moment(state: dict[str, object], number: int, chance: random.Random) -> str:
    slot = chance.choice(["exp_avg", "exp_avg_sq"])
    rows = state["optimizer"].state[parameters(state)[number]][slot].data  # type: ignore[attr-defined]
    rows[chance.randrange(len(rows))] = 3.0
    return f"optimizer.state.model.of.{number}.{slot}"


def an_element_of_a_view(state: dict[str, object], number: int, chance: random.Random) -> str:
    part = parameters(state)[number].data.view(-1)[chance.randrange(1000) :].view(torch.int32)
    part[chance.randrange(len(part))] ^= 1
    return f"model.of.{number}"


def a_column_by_another_thread(state: dict[str, object], number: int, chance: random.Random) -> str:
    column = parameters(state)[number].detach().numpy()[:, chance.randrange(7)]
    thread = threading.Thread(target=lambda: column.__imul__(-1))
    thread.start()
    thread.join()
    return f"model.of.{number}"


def a_few_bytes_by_an_address(state: dict[str, object], number: int, chance: random.Random) -> str:
    tensor = parameters(state)[number]
    start = tensor.data_ptr() + chance.randrange(tensor.nbytes - 8)
    ctypes.memmove(start, bytes(255 ^ byte for byte in ctypes.string_at(start, 8)), 8)
    return f"model.of.{number}"


CHANGES: list[Change] = [
    a_row_through_data, a_row_by_numpy, a_row_of_a_moment, an_element_of_a_view, a_column_by_another_thread,
    a_few_bytes_by_an_address,
]


def adam(count: int, rows: int, *, flat: bool = False) -> dict[str, object]:
    """`count` parameters with moments, in small pages; `flat`: views of one tensor, one after the other."""
    whole = torch.randn(count * rows, 7) if flat else None
    model = Held(*(torch.randn(rows, 7) if whole is None else whole[index * rows :][:rows] for index in range(count)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("flat", [False, True], ids=["each by itself", "views of one tensor"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_partial_change_of_a_large_state_fails_that_save_by_name_by_default(
    tmp_path: Path, change: Change, flat: bool
) -> None:
    """Of 100 MB, which are in small pages, whatever is changed, wherever it lies."""
    state = adam(12, 99_991, flat=flat)
    with opened(tmp_path, keep=fs.Keep(last=1)) as checkpointer:
        io = checkpointer.save(0, state).committed.result().manifest.io
        assert (io.exact_bytes, io.sampled_bytes, io.sampled_because) == (3 * 12 * 99_991 * 28, 0, None)
        for seed in range(1, 7):
            chance = random.Random(f"{change.__name__} {flat} {seed}")
            save = checkpointer.save(seed, state)
            name = change(state, chance.randrange(1, 12), chance)  # the first one's bytes may be captured already
            checkpointer.fence()
            error = save.committed.exception(60)
            assert isinstance(error, fs.StateChangedError), (seed, name)
            assert name in error.names
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.step == 0
        checkpointer.save(99, state).committed.result().verify()


def test_of_two_saves_in_flight_each_is_watched_from_its_own_beginning(tmp_path: Path) -> None:
    """The second protects what the first is watching, and the first lets go of what the second still watches."""
    state = training()
    with opened(tmp_path, watch="exact", saves_in_flight=3) as checkpointer:
        for step, between, after in ((1, True, False), (4, False, True), (7, False, False)):
            first = checkpointer.save(step, state, fence="manual")
            if between:
                by_data(parameters(state)[1], MIB + 5)
            second = checkpointer.save(step + 1, state, fence="manual")
            expected = parameters(state)[1].clone()
            assert not first.captured.done()
            if after:
                writing = checkpointer._saves.captures._pending[0].writing  # waiting for `first` expedites both
                writing.expedite()
                writing.wait_captured()
                by_data(parameters(state)[1], MIB + 5)
            checkpointer.fence()
            errors = (first.committed.exception(60), second.committed.exception(60))
            assert tuple(isinstance(error, fs.StateChangedError) for error in errors) == (between, after)
            if not after:
                assert torch.equal(fs.open(tmp_path, step=step + 1).read("model.of.1"), expected)


def test_what_a_child_writes_is_its_own(tmp_path: Path) -> None:
    state = training()
    with opened(tmp_path, watch="exact") as checkpointer:
        save = checkpointer.save(1, state)
        child = os.fork()
        if child == 0:
            by_numpy(parameters(state)[1], 999_999)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        checkpointer.fence()
        save.committed.result(60)
        save = checkpointer.save(2, state)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        by_numpy(parameters(state)[1], 999_999)  # copied on write, and written all the same
        checkpointer.fence()
        assert isinstance(save.committed.exception(60), fs.StateChangedError)


def test_a_child_that_saves_itself_is_watched_by_itself(tmp_path: Path) -> None:
    state = training()
    with opened(tmp_path / "parent", watch="exact") as checkpointer:
        save = checkpointer.save(1, state)
        child = os.fork()
        if child == 0:
            with opened(tmp_path / "child", watch="exact") as own:
                clean = own.save(1, state).committed.exception(60) is None
                late = own.save(2, state)
                by_numpy(parameters(state)[1], 999_999)
                own.fence()
                os._exit(0 if clean and isinstance(late.committed.exception(60), fs.StateChangedError) else 1)
        assert os.waitpid(child, 0)[1] == 0
        by_numpy(parameters(state)[2], 99_999)
        checkpointer.fence()
        assert isinstance(save.committed.exception(60), fs.StateChangedError)


# Where it cannot be


def unwatched(kind: str, path: Path) -> torch.Tensor:
    """Tensors that something else can write unseen, or of which not every byte on the way is theirs."""
    like = torch.randn(600, 500)
    if kind == "shared":
        return like.share_memory_()
    if kind == "strided":
        return torch.randn(600, 1000)[:, ::2]
    np.save(path, like.numpy())
    return torch.from_numpy(np.load(path, mmap_mode="c"))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("shared", "in memory that others can"), ("of a file", "in memory that others can"), ("strided", "strided")],
)
def test_what_cannot_be_watched_exactly_is_sampled_or_refused_by_name(tmp_path: Path, kind: str, reason: str) -> None:
    odd = unwatched(kind, tmp_path / "file.npy")
    state, events = training(torch.randn(500, 500), odd), list[Event]()
    for step in (1, 2):  # the second time it is known
        with opened(tmp_path / "auto", on_event=events.append) as checkpointer:
            io = checkpointer.save(step, state).committed.result().manifest.io
            assert (io.exact_bytes, io.sampled_bytes) == (1_000_000, 1_200_000)
            assert (io.sampled_because or "").startswith(reason)
    (captured, _) = (event for event in events if isinstance(event, Captured))
    assert (captured.exact_bytes, captured.sampled_bytes) == (1_000_000, 1_200_000)
    with opened(tmp_path / "exact", watch="exact") as checkpointer:
        with pytest.raises(fs.UnsupportedStateError, match=r"model\.of\.1 cannot be watched for every write") as caught:
            checkpointer.save(1, state)
        assert reason in str(caught.value)
        assert checkpointer.latest() is None
        assert not any(entry.name.startswith(".saving") for entry in (tmp_path / "exact").iterdir())
        checkpointer.save(2, training()).committed.result()


def test_samples_alone_where_they_are_asked_for(tmp_path: Path) -> None:
    state = training()
    by_data(torch.zeros(64), 0)  # what torch runs for it is in memory from now on
    with opened(tmp_path, watch="samples") as checkpointer:
        save = checkpointer.save(1, state)
        before = faults()
        by_data(parameters(state)[2], 0)
        assert faults() - before < 8
        checkpointer.fence()
        save.committed.exception(60)
        io = checkpointer.save(2, state).committed.result().manifest.io
        assert io.exact_bytes == 0
        assert io.sampled_because == "as asked for"


def test_a_watch_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="watch 'always' is not one of"):
        fs.EngineOptions(watch="always")  # type: ignore[arg-type]


def test_show_says_how_a_save_was_watched(tmp_path: Path) -> None:
    odd = torch.randn(600, 1000)[:, ::2]
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, training(torch.randn(500, 600), odd))
    shown = CliRunner().invoke(cli.app, ["show", str(tmp_path)]).stdout.replace("\n", " ")
    match = re.search(
        r"50% of the lazy capture watched exactly(?: \(\d+% in huge pages\))?, the rest by samples \(strided\)",
        " ".join(shown.split()),  # memory of another test's, which is in huge pages, may be used again
    )
    assert match, shown
    io = json.loads(CliRunner().invoke(cli.app, ["show", str(tmp_path), "--json"]).stdout)["io"]
    assert (io["exact_bytes"], io["sampled_bytes"], io["sampled_because"]) == (1_200_000, 1_200_000, "strided")


# A save that fails before it captures anything


@pytest.mark.parametrize("fence", ["auto", "manual"])
def test_memory_is_as_before_once_a_save_has_failed_though_its_error_is_kept(tmp_path: Path, fence: Any) -> None:
    state = training()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as checkpointer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limit[1]))  # no segment can have its size
        try:
            with pytest.raises(fs.StorageError) as kept:
                checkpointer.save(1, state, fence=fence)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        before = faults()
        for parameter in parameters(state):
            parameter.data.view(-1)[:: PAGE // 4] += 1.0
        assert faults() - before < 100, "no write to any of some thousand pages tells anybody anything"
        assert kept.value.__traceback__ is not None, "it refers to all that the save had"
