"""Lazy capture: what is saved is the state at `save`, whatever changes it afterwards."""

from __future__ import annotations

import copy
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import flowstone as fs
from distinct_values import distinct
from flowstone import _native
from flowstone.config import Watch
from flowstone.events.phases import Captured, Event, Fenced, Written
from flowstone.save.pacing import Captures
from flowstone.stage import capture
from flowstone.store.base import Pace

MIB = 1 << 20
CRAWL = Pace(blocks=1, bytes_per_s=1)  # the first request goes out, the others wait until something expedites it


def opened(path: Path, *, watch: Watch = "auto", **options: Any) -> fs.Checkpointer:
    """With an arena of two blocks, so that most of the state finds no room in it."""
    engine = fs.EngineOptions(request_bytes=2 * MIB, watch=watch)
    return fs.Checkpointer(path, engine=engine, **{"budget_bytes": 4 * MIB, **options})


@pytest.fixture
def slow() -> Iterator[None]:
    """Capture stays behind until the fence: every test here is about that time."""
    with mock.patch.object(Captures, "pace", return_value=CRAWL):
        yield


pytestmark = pytest.mark.usefixtures("slow")


class Net(nn.Module):
    """Some 5 MB of parameters, a large and a small buffer."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))
        self.register_buffer("table", torch.zeros(256 * 1024))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def fill(state: dict[str, object], value: float) -> None:
    """Every number of the state says the step."""
    for held in state.values():
        if isinstance(held, nn.Module):
            for tensor in (*held.parameters(), *held.buffers()):
                tensor.data.fill_(value)
        elif isinstance(held, torch.optim.Optimizer):
            for slots in held.state.values():
                for tensor in slots.values():
                    tensor.fill_(value)
    state["step"] = int(value)


def training(make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: object) -> dict[str, object]:
    model = Net()
    optimizer = make(model.parameters(), **options)
    backward(model)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 0}


def backward(model: nn.Module) -> None:
    model(torch.randn(2, 512)).square().mean().backward()


def values(path: Path, step: int) -> set[float]:
    """Every distinct number that the checkpoint of a filled state holds, every chunk of it verified."""
    checkpoint = fs.open(path, step=step)
    checkpoint.verify()
    values: set[float] = {float(checkpoint.objects["step"])}
    for segment in checkpoint.segment_paths:
        for name, tensor in load_file(path / segment).items():  # faster than to ask `checkpoint` tensor by tensor
            if not name.startswith("__pad__."):
                values |= distinct(tensor)
    return values


def assert_holds(path: Path, step: int) -> None:
    assert values(path, step) == {float(step)}


# The fence


def test_a_step_after_save_waits_and_the_checkpoint_is_of_before_it(tmp_path: Path) -> None:
    events: list[Event] = []
    state = training()
    fill(state, 1)
    with opened(tmp_path, on_event=events.append) as checkpointer:
        save = checkpointer.save(1, state)
        assert not save.captured.done()
        state["optimizer"].step()  # type: ignore[attr-defined]
        assert save.captured.done()
        save.committed.result()
    assert_holds(tmp_path, 1)
    (fenced,) = (event for event in events if isinstance(event, Fenced))
    assert fenced.step == 1
    assert fenced.waited_s > 0
    (captured,) = (event for event in events if isinstance(event, Captured))
    assert captured.blocked_s < captured.captured_s
    (written,) = (event for event in events if isinstance(event, Written))
    assert 0 < captured.early_bytes < written.copied_bytes


def test_what_is_not_the_optimizers_to_change_is_captured_before_save_returns(tmp_path: Path) -> None:
    state = training()
    fill(state, 1)
    state["plain"] = torch.ones(MIB)
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        state["model"].table.fill_(2)  # type: ignore[attr-defined]
        state["model"].count.fill_(2)  # type: ignore[attr-defined]
        state["plain"].fill_(2)  # type: ignore[attr-defined]
        state["model"].body[0].bias.data.fill_(2)  # type: ignore[attr-defined]  # below 64 KiB
        state["step"] = 2
    assert_holds(tmp_path, 1)


def test_without_an_optimizer_everything_is_captured_before_save_returns(tmp_path: Path) -> None:
    state: dict[str, object] = {"model": Net(), "step": 0}
    fill(state, 1)
    with opened(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        assert save.captured.done()
        fill(state, 2)
    assert_holds(tmp_path, 1)


@pytest.mark.parametrize("fence", ["auto", "manual"])
def test_a_header_that_takes_requests_of_its_own_is_captured_whole(tmp_path: Path, fence: str) -> None:
    state: dict[str, object] = {f"{number:02}{'n' * 60_000}": torch.full((32 * 1024,), 1.0) for number in range(80)}
    with opened(tmp_path) as checkpointer:
        save = checkpointer.save(1, state, fence=fence)  # type: ignore[arg-type]
        assert save.captured.done() == (fence == "auto")
        checkpointer.fence()
    checkpoint = fs.open(tmp_path)
    checkpoint.verify()
    assert set(checkpoint.tensors) == set(state)


def test_by_hand_nothing_large_is_captured_before_the_fence(tmp_path: Path) -> None:
    state: dict[str, object] = {"model": Net(), "plain": torch.ones(8 * MIB), "step": 1}
    fill(state, 1)
    with opened(tmp_path) as checkpointer:
        save = checkpointer.save(1, state, fence="manual")
        assert not save.captured.done()
        checkpointer.fence()
        assert save.captured.done()
        fill(state, 2)
        state["plain"].fill_(2)  # type: ignore[attr-defined]
    assert_holds(tmp_path, 1)


def test_strided_tensors_that_are_captured_early_wait_for_nobodys_pace(tmp_path: Path) -> None:
    """They cannot be written from where they lie, and found no memory ready at a first save."""
    state = training()
    fill(state, 1)
    state["strided"] = torch.ones(2048, 2048)[:, ::2].t()
    with opened(tmp_path) as checkpointer:
        for state["step"] in range(1, 11):
            checkpointer.save(state["step"], state)
            checkpointer.fence()
    for step in range(1, 11):
        assert values(tmp_path, step) == {1.0, float(step)}


@pytest.mark.parametrize("end", ["close", "wait", "load", "committed"])
def test_whoever_waits_for_a_save_does_not_wait_for_a_step(tmp_path: Path, end: str) -> None:
    state = training()
    fill(state, 1)
    with opened(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        if end == "wait":
            checkpointer.wait()
        elif end == "load":
            assert checkpointer.load(state).step == 1
        elif end == "committed":
            checkpointer.fence()
            assert save.committed.result(60).step == 1
    assert_holds(tmp_path, 1)


def test_waiting_for_a_save_expedites_those_before_it(tmp_path: Path) -> None:
    """They are committed in order: the writer's thread comes to the second when it is done with the first."""
    state = training()
    fill(state, 1)
    state["step"] = 0
    with opened(tmp_path, saves_in_flight=3) as checkpointer:
        saves = []
        for state["step"] in (1, 2, 3):
            saves.append(checkpointer.save(state["step"], state, fence="manual"))
        assert not any(save.captured.done() for save in saves)
        saves[1].captured.result(60)
        assert saves[2].committed.result(60).step == 3
    for step in (1, 2, 3):
        assert values(tmp_path, step) == {1.0, float(step)}


def test_a_save_under_way_is_not_called_off(tmp_path: Path) -> None:
    state = training()
    fill(state, 1)
    with opened(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        assert not save.captured.cancel()
        assert not save.committed.cancel()
    assert_holds(tmp_path, 1)


def test_saves_in_flight_need_no_threads_but_those_of_the_first(tmp_path: Path) -> None:
    """Python's: a save that is captured and finds no thread to end it could only be waited for without end."""
    state = training()
    fill(state, 1)
    with opened(tmp_path, saves_in_flight=3) as checkpointer:
        checkpointer.save(1, state, fence="manual")
        with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
            checkpointer.save(2, state, fence="manual")
            checkpointer.save(3, state, fence="manual")
    assert [fs.open(tmp_path, step=step).step for step in (1, 2, 3)] == [1, 2, 3]


# Every kind of optimizer and step


def test_every_optimizer_of_the_state_has_its_fence(tmp_path: Path) -> None:
    model = Net()
    first = torch.optim.SGD(model.body[:2].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.Adam(model.body[2:].parameters(), lr=0.1)
    backward(model)
    first.step()
    second.step()
    state: dict[str, object] = {"model": model, "first": first, "second": second, "step": 0}
    with opened(tmp_path) as checkpointer:
        for step, optimizer in ((1, first), (2, second)):
            fill(state, step)
            save = checkpointer.save(step, state)
            assert not save.captured.done()
            optimizer.step()
            assert save.captured.done()
    assert_holds(tmp_path, 1)
    assert_holds(tmp_path, 2)


def test_gradient_accumulation_goes_on_while_the_save_waits_for_the_step(tmp_path: Path) -> None:
    state = training()
    fill(state, 1)
    with opened(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        for _ in range(3):
            backward(state["model"])  # type: ignore[arg-type]
        assert not save.captured.done()
        state["optimizer"].step()  # type: ignore[attr-defined]
    assert_holds(tmp_path, 1)


def test_an_optimizer_that_steps_inside_backward(tmp_path: Path) -> None:
    model = Net()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    state: dict[str, object] = {"model": model, "step": 0}
    state |= {f"optimizer{i}": optimizer for i, optimizer in enumerate(optimizers.values())}
    fill(state, 1)
    with opened(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        assert not save.captured.done()
        backward(model)
        assert save.captured.done()
    assert_holds(tmp_path, 1)


def test_a_gradient_scaler_steps_through_the_fence(tmp_path: Path) -> None:
    state = training(torch.optim.SGD, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    fill(state, 1)
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.zero_grad()
    with opened(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        scaler.scale(model(torch.randn(2, 512)).square().mean()).backward()
        scaler.unscale_(optimizer)
        assert not save.captured.done()
        scaler.step(optimizer)
        scaler.update()
        assert save.captured.done()
    assert_holds(tmp_path, 1)


def test_an_average_and_a_scheduler_that_follow_the_step(tmp_path: Path) -> None:
    state = training()
    average = AveragedModel(state["model"])  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.StepLR(state["optimizer"], 1)  # type: ignore[arg-type]
    state |= {"average": average}
    fill(state, 1)
    with opened(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        assert not save.captured.done()
        state["optimizer"].step()  # type: ignore[attr-defined]
        scheduler.step()
        average.update_parameters(state["model"])  # type: ignore[arg-type]
    assert_holds(tmp_path, 1)


@pytest.mark.parametrize("first", ["compiled", "saved"])
def test_a_compiled_step_breaks_its_graph_at_the_fence(tmp_path: Path, first: str) -> None:
    state = training()
    step = torch.compile(lambda: state["optimizer"].step(), backend="eager")  # type: ignore[attr-defined]
    if first == "compiled":
        step()
    fill(state, 1)
    with opened(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        assert not save.captured.done()
        step()
        assert save.captured.done()
    assert_holds(tmp_path, 1)


def test_a_step_that_may_not_break_its_graph_is_refused_before_it_changes_anything(tmp_path: Path) -> None:
    state = training()
    fill(state, 1)
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        step = torch.compile(lambda: state["optimizer"].step(), backend="eager", fullgraph=True)  # type: ignore[attr-defined]
        with pytest.raises(torch._dynamo.exc.Unsupported, match="before_step"):
            step()
    assert_holds(tmp_path, 1)


def test_parameters_that_are_replaced_after_save_were_saved_as_they_were(tmp_path: Path) -> None:
    state = training()
    fill(state, 1)
    model = state["model"]
    assert isinstance(model, Net)
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        for layer in model.body:
            layer.weight.data = torch.full_like(layer.weight, 2)
    assert_holds(tmp_path, 1)


def test_an_optimizer_pickles_copies_and_dies_as_if_it_had_no_fence(tmp_path: Path) -> None:
    import gc
    import pickle
    import weakref

    state = training()
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        copy.deepcopy(state["optimizer"]).step()  # type: ignore[attr-defined]
        pickle.loads(pickle.dumps(state["optimizer"])).step()
        checkpointer.wait()
        gone = weakref.ref(state["optimizer"])
        state.clear()
        gc.collect()
        assert gone() is None


def test_a_child_process_steps_without_waiting(tmp_path: Path) -> None:
    state = training()
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        child = os.fork()
        if child == 0:
            with torch.no_grad():
                checkpointer._saves.fencing._before_step()  # by a hook: torch's own threads do not survive a fork
            os._exit(0)
        watchdog = threading.Timer(60, os.kill, (child, 9))
        watchdog.start()
        assert os.waitpid(child, 0)[1] == 0
        watchdog.cancel()


# What escapes


def test_a_change_that_escapes_the_fence_fails_that_save_by_name(tmp_path: Path) -> None:
    state = training()
    model = state["model"]
    assert isinstance(model, Net)
    fill(state, 1)
    with opened(tmp_path, on_error="continue") as checkpointer:
        checkpointer.save(1, state).committed.exception()
        fill(state, 2)
        save = checkpointer.save(2, state)
        model.body[4].weight.data.add_(1)
        checkpointer.fence()
        error = save.committed.exception(60)
        assert isinstance(error, fs.StateChangedError)
        assert error.names == ("model.body.4.weight",)
        assert "model.body.4.weight changed before it was captured" in str(error)
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.step == 1
        fill(state, 3)
        checkpointer.save(3, state)
    assert_holds(tmp_path, 1)
    assert_holds(tmp_path, 3)


def outside(state: dict[str, object], **options: bool) -> None:
    """A step of an optimizer that is not in the state."""
    torch.optim.AdamW(state["model"].parameters(), lr=0.5, **options).step()  # type: ignore[attr-defined]


def in_place(state: dict[str, object]) -> None:
    with torch.no_grad():
        for parameter in state["model"].parameters():  # type: ignore[attr-defined]
            parameter.mul_(3)


def one_slot(state: dict[str, object]) -> None:
    for slots in state["optimizer"].state.values():  # type: ignore[attr-defined]
        slots["exp_avg"].add_(1)


ESCAPES: dict[str, Callable[[dict[str, object]], None]] = {
    "in place": in_place, "optimizer state": one_slot, "plain": outside,
    "fused": lambda state: outside(state, fused=True), "foreach": lambda state: outside(state, foreach=True),
}


@pytest.mark.parametrize("watch", ["auto", "samples"])
@pytest.mark.parametrize("escape", ESCAPES)
def test_a_dense_change_is_noticed_whoever_makes_it(tmp_path: Path, escape: str, watch: Watch) -> None:
    state = training()
    fill(state, 1)
    with opened(tmp_path, watch=watch, on_error="continue") as checkpointer:
        save = checkpointer.save(1, state)
        ESCAPES[escape](state)
        error = save.committed.exception(60)
        assert isinstance(error, fs.StateChangedError)
        assert error.names
        assert all(name.startswith(("model.body.", "optimizer.state.")) for name in error.names)
        assert checkpointer.latest() is None


@pytest.mark.parametrize("sampled", [True, False])
def test_a_change_of_one_byte_is_noticed_where_it_is_looked_at_and_nowhere_else(
    tmp_path: Path, sampled: bool
) -> None:
    """The odds of samples that docs/SAVING.md states: what is not looked at is saved as it was at its capture."""
    state = training()
    weight = state["model"].body[1].weight  # type: ignore[attr-defined]
    begins = _native.line_begins(np.array([weight.nbytes], np.uint64), np.zeros(1, np.uint64)).tolist()
    byte = begins[1] if sampled else begins[1] + _native.LINE_BYTES
    assert sampled or byte not in begins
    seeds = mock.patch.object(capture, "_seeds", lambda pieces, _: np.zeros(pieces, np.uint64))
    with seeds, opened(tmp_path, watch="samples", on_error="continue") as checkpointer:
        save = checkpointer.save(1, state)
        weight.data.view(-1).view(torch.uint8)[byte] ^= 1
        error = save.committed.exception(60)
    if sampled:
        assert isinstance(error, fs.StateChangedError)
        assert error.names == ("model.body.1.weight",)
    else:
        assert error is None
        assert torch.equal(fs.open(tmp_path).read("model.body.1.weight"), weight)


# Honesty


@pytest.mark.parametrize("seed", range(3))
def test_every_checkpoint_holds_exactly_one_value(tmp_path: Path, seed: int) -> None:
    hold_one_value(tmp_path, seed, saves=15)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_every_one_of_a_thousand_checkpoints_holds_exactly_one_value(tmp_path: Path, seed: int) -> None:
    hold_one_value(tmp_path, 1000 + seed, saves=100)


def hold_one_value(path: Path, seed: int, *, saves: int) -> None:
    """Random arenas, limits, paces, delays, swaps and reallocations; the fence is all that keeps it honest."""
    chance = random.Random(seed)
    state = training()
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, Net)
    assert isinstance(optimizer, torch.optim.Optimizer)
    kept = []
    engine = fs.EngineOptions(
        request_bytes=chance.choice((2, 4)) * MIB, queue_depth=chance.choice((1, 4, 16)),
        direct=chance.choice(("auto", "off")),
        backend=chance.choice(("auto", "posix")),
        write_bytes_per_s=chance.choice((None, 100 * MIB, 300 * MIB)),  # a writer that is late
    )
    with fs.Checkpointer(
        path, engine=engine, budget_bytes=chance.choice((8, 16, 64)) * MIB, saves_in_flight=chance.randint(1, 3),
        keep=fs.Keep(last=saves),
    ) as checkpointer:
        for step in range(1, saves + 1):
            fill(state, step)
            pace = chance.choice((CRAWL, Pace(0), Pace(2, 100 * MIB), Pace()))
            with mock.patch.object(Captures, "pace", return_value=pace):
                kept.append(checkpointer.save(step, state))
            if chance.random() < 0.3:
                layer = model.body[chance.randrange(5)]
                layer.weight.data = layer.weight.data.clone()
            if chance.random() < 0.3:
                weight, two = model.body[0].weight, model.body[1].weight
                weight.data, two.data = two.data, weight.data
            chance.choice((optimizer.step, checkpointer.fence))()
    for save in kept:
        assert_holds(path, save.committed.result().step)
