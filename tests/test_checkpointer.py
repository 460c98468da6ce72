"""The Checkpointer: the promises of save and load to the training loop around them."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import flowstone as fs
from flowstone import _native
from flowstone.events.phases import (
    Captured,
    Committed,
    Event,
    Loaded,
    LoadProgress,
    Removed,
    SaveFailed,
    SaveStarted,
    Written,
)
from flowstone.state import describe
from forge import content, split_rows

MIB = 1 << 20


def steps(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir() if not path.name.startswith("flowstone."))


def filled(value: float, elements: int = 4) -> dict[str, object]:
    return {"x": torch.full((elements,), value), "step": int(value)}


def gate() -> tuple[threading.Event, Callable[..., object]]:
    """An event, and a stand-in for `publish.publish` that waits for it: a save that is in flight until told."""
    from flowstone.commit import publish

    opened, real = threading.Event(), publish.publish

    def publish_later(*args: object, **more: object) -> object:
        assert opened.wait(60)
        return real(*args, **more)  # type: ignore[arg-type]

    return opened, publish_later


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, object]]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": fs.rng(), "step": 0}
    return model, optimizer, state


def train(state: dict[str, object], count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = state["model"](torch.randn(4, 8)).square().sum()  # type: ignore[operator]
        state["optimizer"].zero_grad()  # type: ignore[attr-defined]
        loss.backward()
        state["optimizer"].step()  # type: ignore[attr-defined]
        state["scheduler"].step()  # type: ignore[attr-defined]
        state["step"] = int(state["step"]) + 1  # type: ignore[call-overload]
        losses.append(loss.item())
    return losses


# A save


def test_a_resumed_run_is_bit_identical_to_an_undisturbed_one(store: Path) -> None:
    torch.manual_seed(1)
    _, _, state = training()
    train(state, 5)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(5, state)
        losses = train(state, 5)
        expected = content({k: v for k, v in state.items() if k != "rng"})
    torch.manual_seed(99)
    _, _, resumed = training()
    train(resumed, 1)
    with fs.Checkpointer(store) as checkpointer:
        assert checkpointer.load(resumed).step == 5
    assert resumed["step"] == 5
    assert train(resumed, 5) == losses
    assert content({k: v for k, v in resumed.items() if k != "rng"}) == expected


def test_save_returns_before_the_checkpoint_exists_and_committed_after(store: Path) -> None:
    opened, publish_later = gate()
    with mock.patch("flowstone.commit.publish.publish", publish_later), fs.Checkpointer(store) as checkpointer:
        save = checkpointer.save(3, filled(3))
        assert isinstance(save.captured, Future)
        assert save.captured.done()
        assert not save.committed.done()
        assert not (store / "step-00000003").exists()
        checkpointer.fence()
        opened.set()
        checkpoint = save.committed.result(60)
    assert (checkpoint.step, save.step, checkpoint.path) == (3, 3, f"{store}/step-00000003")
    assert checkpoint.read("x").tolist() == [3, 3, 3, 3]


def test_a_state_changed_right_after_save_does_not_change_the_checkpoint(store: Path) -> None:
    """Also what waits for room in the arena: most of it, with this budget."""
    x = torch.arange(24 * MIB, dtype=torch.float32)
    expected = x.clone()
    with fs.Checkpointer(store, budget_bytes=32 * MIB) as checkpointer:
        save = checkpointer.save(1, {"x": x})
        x.zero_()
        save.committed.result()
        target = torch.zeros_like(x)
        checkpointer.load({"x": target})
    assert torch.equal(target, expected)


def test_latest_and_load_wait_for_a_save_in_flight(store: Path) -> None:
    opened, publish_later = gate()
    with mock.patch("flowstone.commit.publish.publish", publish_later), fs.Checkpointer(store) as checkpointer:
        target = filled(0)
        for step, ask in ((1, checkpointer.latest), (2, lambda: checkpointer.load(target))):
            opened.clear()
            checkpointer.save(step, filled(step))
            threading.Timer(0.1, opened.set).start()
            actual = ask()
            assert actual is not None
            assert actual.step == step
    assert target["step"] == 2


def test_wait_returns_once_everything_is_durable(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        save = checkpointer.save(1, filled(1))
        checkpointer.wait()
        assert save.committed.done()
        assert fs.open(store).step == 1


@pytest.mark.parametrize("limit", [1, 3])
def test_a_new_save_waits_when_too_many_are_in_flight(store: Path, limit: int) -> None:
    with fs.Checkpointer(store, saves_in_flight=limit) as checkpointer:
        saves = [checkpointer.save(step, filled(step)) for step in range(1, 6)]
        assert all(save.committed.done() for save in saves[: -limit])
    assert steps(store) == [f"step-{step:08d}" for step in range(1, 6)]


def test_leaving_the_context_waits_for_the_save_and_frees_the_store(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        save = checkpointer.save(1, filled(1))
    assert save.committed.done()
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(2, filled(2))


def test_memory_of_the_saved_state_is_let_go(store: Path) -> None:
    import weakref

    x = torch.ones(MIB)
    gone = weakref.ref(x)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": x}).committed.result()
        checkpointer.wait()
        del x
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("value", ["soon", None])
def test_an_unknown_fence_is_refused(store: Path, value: object) -> None:
    with fs.Checkpointer(store) as checkpointer, pytest.raises(ValueError, match="neither 'auto' nor 'manual'"):
        checkpointer.save(1, {"x": 1}, fence=value)  # type: ignore[arg-type]


def test_unknown_options_are_refused(store: Path) -> None:
    with pytest.raises(ValueError, match="on_error 'ignore' is neither 'raise' nor 'continue'"):
        fs.Checkpointer(store, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend 'aio'"):
        fs.EngineOptions(backend="aio")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="request_bytes 5000 is not a multiple of 4096"):
        fs.EngineOptions(request_bytes=5000)
    with pytest.raises(ValueError, match=r"request_bytes 1048576 is not a multiple of 4096 between 2 and 64 MiB"):
        fs.EngineOptions(request_bytes=MIB)


def test_a_budget_below_two_requests_is_refused_and_leaves_nothing(store: Path) -> None:
    with fs.Checkpointer(store, budget_bytes=MIB) as checkpointer:
        with pytest.raises(fs.BudgetError, match="cannot hold two requests of 8388608") as caught:
            checkpointer.save(1, filled(1))
        assert "raise budget_bytes" in str(caught.value.facts["next"])
    assert steps(store) == []


# Retention


@pytest.mark.parametrize(
    ("keep", "left"),
    [(None, [1, 2, 3, 4, 5, 6]), (fs.Keep(), [6]), (fs.Keep(last=2), [5, 6]), (fs.Keep(last=1, every=2), [2, 4, 6])],
)
def test_retention_keeps_what_it_says(store: Path, keep: fs.Keep | None, left: list[int]) -> None:
    with fs.Checkpointer(store, keep=keep) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, filled(step))
    assert steps(store) == [f"step-{step:08d}" for step in left]
    for step in left:
        assert fs.open(store, step).verify().sound


def test_retention_waits_until_the_successor_is_durable(store: Path) -> None:
    opened, publish_later = gate()
    with fs.Checkpointer(store, keep=fs.Keep()) as checkpointer:
        checkpointer.save(1, filled(1)).committed.result()
        with mock.patch("flowstone.commit.publish.publish", publish_later):
            save = checkpointer.save(2, filled(2))
            assert "step-00000001" in steps(store)
            opened.set()
            save.committed.result(60)
    assert steps(store) == ["step-00000002"]


def test_a_new_writer_sweeps_what_a_dead_one_left(store: Path) -> None:
    (store / ".saving-00000001-dead").mkdir(parents=True)
    (store / ".saving-00000001-dead/rank-00000.safetensors").write_bytes(bytes(4096))
    events: list[Event] = []
    with fs.Checkpointer(store, on_event=events.append) as checkpointer:
        assert checkpointer.latest() is None
        assert steps(store) == [".saving-00000001-dead"], "only a writer may remove"
        checkpointer.save(1, filled(1))
    assert steps(store) == ["step-00000001"]
    assert Removed(".saving-00000001-dead", "a save that never finished") in events


# Events


def test_events_tell_every_phase_in_order_with_its_numbers(store: Path) -> None:
    events: list[Event] = []
    with fs.Checkpointer(store, on_event=events.append) as checkpointer:
        checkpointer.save(1, filled(1.0, MIB)).committed.result()
        checkpointer.load(filled(0.0, MIB))
    assert [type(event) for event in events if not isinstance(event, LoadProgress)] == [
        SaveStarted, Captured, Written, Committed, Loaded
    ]
    started, captured, written, committed = events[:4]
    assert isinstance(started, SaveStarted)
    assert isinstance(captured, Captured)
    assert isinstance(written, Written)
    assert isinstance(committed, Committed)
    assert (started.step, started.tensors, started.bytes, started.plan_cached) == (1, 1, 4 * MIB, False)
    assert 0 < captured.blocked_s <= committed.seconds
    assert 4 * MIB <= written.copied_bytes <= 4 * MIB + 8192
    assert isinstance(events[-1], Loaded)
    assert events[-1].bytes == 4 * MIB


def test_a_watcher_that_raises_breaks_nothing(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    def watch(event: Event) -> None:
        raise RuntimeError(f"no {type(event).__name__} please")

    with fs.Checkpointer(store, on_event=watch) as checkpointer:
        checkpointer.save(1, filled(1))
    assert fs.open(store).verify().sound
    assert "on_event raised an error for Committed" in caplog.text


@pytest.mark.parametrize("expected", [Committed, Loaded])
def test_sys_exit_in_a_callback_ends_who_called_and_no_thread_of_ours(store: Path, expected: type) -> None:
    def watch(event: Event) -> None:
        if isinstance(event, expected):
            sys.exit("enough")

    with fs.Checkpointer(store, on_event=watch) as checkpointer:
        assert checkpointer.save(1, {"x": torch.zeros(3)}).committed.result(timeout=60).step == 1
        ends = pytest.raises(SystemExit, match="enough") if expected is Loaded else contextlib.nullcontext()
        with ends:
            checkpointer.load({"x": torch.ones(3)})
        checkpointer.save(2, {"x": torch.zeros(3)}).committed.result(timeout=60)


def test_the_plan_is_made_once_for_a_layout(store: Path) -> None:
    events: list[Event] = []
    with fs.Checkpointer(store, on_event=events.append) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3), "n": 1})
        checkpointer.save(2, {"x": torch.zeros(3), "n": 2})
        checkpointer.save(3, {"x": torch.zeros(4), "n": 2})
        checkpointer.save(4, {"x": torch.zeros(4), "y": torch.zeros(1)})
    assert [event.plan_cached for event in events if isinstance(event, SaveStarted)] == [False, True, False, False]
    assert fs.open(store, 2).read("x").tolist() == [0, 0, 0]


# Failures


def failing(times: int) -> Callable[..., object]:
    """A `publish.publish` that fails so many times."""
    from flowstone.commit import publish

    real, left = publish.publish, [times]

    def maybe(*args: object, **more: object) -> object:
        left[0] -= 1
        if left[0] >= 0:
            raise fs.StorageError("cannot write manifest.json", errno=5, next="check the disk")
        return real(*args, **more)  # type: ignore[arg-type]

    return maybe


def test_a_failed_save_raises_at_the_next_call_and_only_once(store: Path) -> None:
    events: list[Event] = []
    failure = mock.patch("flowstone.commit.publish.publish", failing(1))
    with failure, fs.Checkpointer(store, saves_in_flight=1, on_event=events.append) as checkpointer:
        checkpointer.save(1, filled(1))
        with pytest.raises(fs.SaveFailedError) as caught:
            checkpointer.save(2, filled(2))
        assert caught.value.message.startswith("step 1 was not saved: cannot write manifest.json")
        assert caught.value.facts["newest"] == "none"
        assert isinstance(caught.value.__cause__, fs.StorageError)
        checkpointer.wait()
        checkpointer.save(2, filled(2))
    assert steps(store) == ["step-00000002"]
    assert [event.step for event in events if isinstance(event, SaveFailed)] == [1]


@pytest.mark.parametrize("call", ["wait", "close"])
def test_a_failed_save_raises_at_wait_and_close(store: Path, call: str) -> None:
    with mock.patch("flowstone.commit.publish.publish", failing(1)):
        checkpointer = fs.Checkpointer(store)
        checkpointer.save(1, filled(1))
        with pytest.raises(fs.SaveFailedError, match="step 1 was not saved"):
            getattr(checkpointer, call)()
        checkpointer.close()


@pytest.mark.parametrize("ask", ["result", "exception"])
def test_a_failure_that_its_future_gave_is_not_raised_again(store: Path, ask: str) -> None:
    with mock.patch("flowstone.commit.publish.publish", failing(1)), fs.Checkpointer(store) as checkpointer:
        save = checkpointer.save(1, filled(1))
        if ask == "result":
            with pytest.raises(fs.StorageError, match=r"cannot write manifest\.json"):
                save.committed.result()
        else:
            assert isinstance(save.committed.exception(), fs.StorageError)
        checkpointer.save(2, filled(2))
    assert steps(store) == ["step-00000002"]


def test_a_timeout_is_no_sight_of_the_failure(store: Path) -> None:
    opened, publish_later = gate()
    with mock.patch("flowstone.commit.publish.publish", publish_later), fs.Checkpointer(store) as checkpointer:
        save = checkpointer.save(1, filled(1))
        with pytest.raises(TimeoutError):
            save.committed.result(0)
        with pytest.raises(TimeoutError):
            save.committed.exception(0)
        assert not save.committed.reported
        opened.set()


def test_on_error_continue_goes_on_until_too_many_steps_are_unsaved(store: Path) -> None:
    with (
        mock.patch("flowstone.commit.publish.publish", failing(4)),
        fs.Checkpointer(store, saves_in_flight=1, on_error="continue", max_unsaved_steps=20) as checkpointer,
    ):
        checkpointer.save(10, filled(10))
        checkpointer.save(20, filled(20))
        checkpointer.save(30, filled(30))
        checkpointer.save(40, filled(40))  # 30 was not saved: 20 steps since 10, the first unsaved, is allowed
        with pytest.raises(fs.SaveFailedError, match="step 40 was not saved"):
            checkpointer.save(50, filled(50))
        checkpointer.save(50, filled(50))
    assert steps(store) == ["step-00000050"]


def test_an_error_on_the_way_is_not_masked_by_a_failed_save(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    failure = mock.patch("flowstone.commit.publish.publish", failing(1))
    with failure, pytest.raises(KeyError, match="mine"), fs.Checkpointer(store) as checkpointer:  # noqa: PT012
        checkpointer.save(1, filled(1))
        raise KeyError("mine")
    assert "step 1 was not saved" in caplog.text


def test_a_failed_save_leaves_the_one_before_it_and_no_leftover(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, filled(1)).committed.result()
        with mock.patch("flowstone.commit.publish.publish", failing(1)):
            checkpointer.save(2, filled(2)).committed.exception()
    assert steps(store) == ["step-00000001"]
    assert fs.open(store).verify().sound


# Engines and memory


def test_a_budget_of_32_mib_saves_and_loads_a_state_several_times_larger(store: Path) -> None:
    a, b = torch.arange(20 * MIB, dtype=torch.int32), torch.arange(12 * MIB, dtype=torch.int32)
    state = {"a": a, "b": b.reshape(3, -1).T}
    with fs.Checkpointer(store, budget_bytes=32 * MIB) as checkpointer:
        checkpointer.save(1, state).committed.result()
        blank = {name: torch.zeros_like(value) for name, value in state.items()}
        checkpointer.load(blank)
    assert all(torch.equal(blank[name], value) for name, value in state.items())


ENGINES = [(b, d) for b in ("posix", "io_uring") for d in ("on", "off") if b == "posix" or _native.has_io_uring()]


def test_every_engine_writes_the_same_bytes(tmp_path: Path) -> None:
    state: dict[str, object] = {
        "large": torch.arange(3 * MIB, dtype=torch.int64), "strided": torch.arange(MIB).reshape(1024, 1024).T,
        "odd": torch.arange(100_003, dtype=torch.uint8), "small": [torch.full((n,), n) for n in range(50)],
    }
    files = {}
    for backend, direct in ENGINES:
        options = fs.EngineOptions(backend=backend, direct=direct, request_bytes=2 * MIB, queue_depth=4)  # type: ignore[arg-type]
        store = tmp_path / f"{backend}-{direct}"
        try:
            with fs.Checkpointer(store, engine=options) as checkpointer:
                checkpointer.save(1, state)
        except fs.StorageError as error:
            if "refuses direct I/O" not in str(error):
                raise
            continue  # this file system has no O_DIRECT
        for reader in ENGINES:
            if reader[1] == "off":
                engine = fs.EngineOptions(backend=reader[0], direct="off")  # type: ignore[arg-type]
                assert fs.open(store, engine=engine).verify().sound
        io = fs.open(store).manifest.io
        assert (io.backend, io.alignment > 1) == (backend, direct == "on")
        files[store.name] = [(store / "step-00000001" / name).read_bytes() for name in
                             ("rank-00000.safetensors", "index.safetensors", "objects.json")]
    assert len(files) >= 1
    first = next(iter(files.values()))
    assert all(data == first for data in files.values()), f"differ: {list(files)}"


# What is saved


def test_tied_weights_are_stored_once_and_tied_again(store: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100, bias=False)
            self.head.weight = self.embed.weight

    model, other = Tied(), Tied()
    with fs.Checkpointer(store) as checkpointer:
        checkpoint = checkpointer.save(1, {"model": model}).committed.result()
        checkpointer.load({"model": other})
    assert checkpoint.manifest.data_bytes == 100 * 64 * 4
    assert checkpoint.tensors["model.head.weight"].alias_of == "model.embed.weight"
    assert torch.equal(checkpoint.read("model.head.weight"), model.embed.weight)
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.embed.weight, model.embed.weight)


def test_views_are_stored_exactly_not_their_storage(store: Path) -> None:
    base = torch.arange(4 * MIB, dtype=torch.float32).reshape(2048, 2048)
    state = {"column": base[:, 5], "block": base[10:20, 30:50], "rows": base.T[:3]}
    with fs.Checkpointer(store) as checkpointer:
        checkpoint = checkpointer.save(1, state).committed.result()
        other = torch.zeros(2048, 2048)
        blank = {"column": other[:, 5], "block": other[10:20, 30:50], "rows": other.T[:3]}
        checkpointer.load(blank)
    assert checkpoint.manifest.data_bytes == (2048 + 200 + 3 * 2048) * 4
    for name, value in state.items():
        assert torch.equal(blank[name], value), name
    outside = other.clone()
    for view in (outside[:, 5], outside[10:20, 30:50], outside.T[:3]):
        view.zero_()
    assert not outside.any(), "a load wrote outside the views"


def test_rng_continues_the_very_sequence(store: Path) -> None:
    import random

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"rng": fs.rng()})
        expected = random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist(), torch.randn(3).tolist()
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(6)
        checkpointer.wait()
        checkpointer.load({"rng": fs.rng()})
    assert (random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist(), torch.randn(3).tolist()) == expected


def test_per_rank_values_are_kept_apart_and_put_back(store: Path) -> None:
    holder = fs.PerRank({"seed": 5, "noise": torch.ones(3)})
    with fs.Checkpointer(store) as checkpointer:
        checkpoint = checkpointer.save(1, {"own": holder, "all": 1}).committed.result()
        blank = fs.PerRank({"seed": 0, "noise": torch.zeros(3)})
        checkpointer.load({"own": blank, "all": 0})
    assert list(checkpoint.objects) == ["all"]
    assert list(checkpoint.contents.per_rank) == ["own"]
    assert blank.value["seed"] == 5  # type: ignore[index]
    assert blank.value["noise"].tolist() == [1, 1, 1]  # type: ignore[index]


# Shards: one process stands in for several ranks


def save_split(store: Path, state: dict[str, object], name: str, row: int) -> None:
    split = lambda state, **how: split_rows(describe(state, **how), name, row)  # noqa: E731
    with mock.patch("flowstone.save.planning.describe", split), fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state)


@pytest.mark.parametrize("cut", [1, 300, 999])
def test_shards_load_into_other_boundaries(store: Path, cut: int) -> None:
    table = torch.arange(1000 * 700, dtype=torch.int32).reshape(1000, 700)
    save_split(store, {"table": table}, "table", cut)
    with fs.Checkpointer(store) as checkpointer:
        for begin, end, left, right in ((0, 500, 0, 700), (250, 1000, 0, 700), (299, 301, 7, 8), (5, 5, 0, 700)):
            part = torch.zeros(end - begin, right - left, dtype=torch.int32)
            checkpointer.load({"table": fs.Shard(part, (1000, 700), (begin, left))})
            assert torch.equal(part, table[begin:end, left:right])
        whole = torch.zeros_like(table)
        checkpointer.load({"table": whole})
    assert torch.equal(whole, table)
    box = fs.Box((cut - 1, 3), (2, 11)) if cut < 999 else fs.Box((998, 0), (2, 700))
    expected = table[tuple(map(slice, box.offset, box.end))]
    assert torch.equal(fs.open(store).read("table", box), expected)
    assert np.array_equal(fs.open(store).read("table", box, framework="numpy"), expected.numpy())


def test_a_shard_that_is_not_the_whole_tensor_cannot_be_saved_alone(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        with pytest.raises(fs.CoverageError, match=r"cannot save 'w': no shard holds \[2:4,0:3\]") as caught:
            checkpointer.save(1, {"w": fs.Shard(torch.ones(2, 3), (4, 3), (0, 0))})
        assert "shards that fill shape (4, 3)" in str(caught.value.facts["expected"])
        checkpointer.save(1, {"w": fs.Shard(torch.ones(4, 3), (4, 3), (0, 0))})
    assert fs.open(store).tensors["w"].shape == (4, 3)


def test_a_shard_of_another_global_shape_is_a_mismatch(store: Path) -> None:
    save_split(store, {"w": torch.ones(4, 3)}, "w", 2)
    with fs.Checkpointer(store) as checkpointer, pytest.raises(fs.MismatchError, match=r"wanted \(8, 3\), stored"):
        checkpointer.load({"w": fs.Shard(torch.ones(4, 3), (8, 3), (0, 0))})


# Reading


def test_reading_what_numpy_lacks_says_what_to_do(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # as if it were not installed
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3, dtype=torch.bfloat16)})
    with pytest.raises(fs.UnsupportedStateError, match="numpy has no dtype bfloat16") as caught:
        fs.open(store).read("w", framework="numpy")
    assert "framework='torch'" in str(caught.value.facts["next"])
    assert fs.open(store).read("w").dtype is torch.bfloat16


def test_reading_what_is_not_there_is_refused(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": {"wte": {"weight": torch.ones(3)}}})
    checkpoint = fs.open(store)
    with pytest.raises(KeyError, match=r"no tensor 'wte\.weight' in this checkpoint; there is model\.wte\.weight"):
        checkpoint.read("wte.weight")
    with pytest.raises(ValueError, match=r"box \[2:4\] does not fit in 'model\.wte\.weight' of shape \(3,\)"):
        checkpoint.read("model.wte.weight", fs.Box((2,), (2,)))
    with pytest.raises(ValueError, match="framework 'jax'"):
        checkpoint.read("model.wte.weight", framework="jax")  # type: ignore[call-overload]


def test_the_readme_face_of_an_open_checkpoint(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1200, {"model": torch.nn.Linear(3, 2), "step": 1200, "config": {"lr": 0.1}})
    checkpoint = fs.open(store, step=1200)
    assert checkpoint.step == 1200
    assert checkpoint.tensors["model.weight"].shape == (2, 3)
    assert checkpoint.objects["step"] == 1200
    assert checkpoint.objects["config"] == {"lr": 0.1}
    assert checkpoint.verify().sound
    assert partial(fs.open, store)().path == f"{store}/step-00001200"


def test_a_healthy_run_says_one_line_for_each_commit_and_load(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flowstone"), fs.Checkpointer(store) as checkpointer:
        checkpointer.save(7, filled(1)).committed.result()
        checkpointer.load(filled(0))
    messages = [re.sub(r"[\d,]+ bytes in [\d.]+ s", "N bytes in N s", message) for message in caplog.messages]
    assert messages == [f"committed step 7: N bytes in N s, in {store}", f"loaded step 7: N bytes in N s, in {store}"]
