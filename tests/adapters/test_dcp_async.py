"""dcp.async_save through Flowstone: staging, both executors, reused memory."""

from __future__ import annotations

import ctypes
import mmap
import pickle
import threading
from collections import OrderedDict
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from torch import nn
from torch.distributed.checkpoint.staging import AsyncStager

import flowstone as fs
from flowstone.adapters.dcp import FlowstoneStager, FlowstoneWriter
from flowstone.adapters.dcp.staged_state import StagedState

ACTS = "adapters.dcp_acts"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def addresses(state: dict[str, torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in state.values()}


def test_a_writer_and_a_stager_are_stagers() -> None:
    assert isinstance(FlowstoneWriter("x"), AsyncStager)
    assert isinstance(FlowstoneStager(), AsyncStager)


def test_a_staged_state_is_the_same_and_stays_so() -> None:
    state: dict[str, Any] = {
        "w": nn.Parameter(torch.arange(6.0).reshape(2, 3)), "t": torch.arange(6.0).reshape(2, 3).T,
        "conj": torch.tensor([1 + 2j]).conj(), "none": torch.zeros(0, 2), "scalar": torch.tensor(4),
        "more": OrderedDict(a=[torch.ones(2), {"k": (1, torch.ones(1))}]), "plain": {"list": [1, 2]},
    }
    staged: Any = FlowstoneStager().stage(state)
    with torch.no_grad():
        state["w"].zero_()
        state["t"].zero_()
        state["more"]["a"][0].zero_()
    state["plain"]["list"].append(3)
    assert staged["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert type(staged["w"]) is torch.Tensor
    assert staged["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert staged["conj"].tolist() == [1 - 2j]
    assert (tuple(staged["none"].shape), int(staged["scalar"])) == ((0, 2), 4)
    assert type(staged["more"]) is OrderedDict
    assert staged["more"]["a"][0].tolist() == [1, 1]
    assert staged["more"]["a"][1]["k"][1].tolist() == [1]
    assert staged["plain"] == {"list": [1, 2]}


REFUSAL = FlowstoneStager.guard_refusal()
BIG = 1 << 22  # elements: 16 MiB
PROT_NONE = 0


def large(count: int = 12) -> dict[str, torch.Tensor]:
    return {f"w{index}": torch.arange(index, index + BIG, dtype=torch.float32) for index in range(count)}


@pytest.mark.skipif(REFUSAL != "", reason=REFUSAL)
def test_a_state_may_change_while_it_is_copied() -> None:
    stager, state = FlowstoneStager(), large()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(3):
        staged: Any = stager.stage(state)
        for value in reversed(state.values()):
            value.add_(1)
        assert stager._buffers[0]._copy.guarded_bytes > 12 * BIG * 4 * 0.99  # type: ignore[union-attr]
        assert all(torch.equal(staged[name], tensor) for name, tensor in expected.items())
        expected = {name: tensor.clone() for name, tensor in state.items()}
        del staged


@pytest.mark.skipif(REFUSAL != "", reason=REFUSAL)
def test_memory_that_is_taken_away_while_it_is_copied_fails_the_save_by_name() -> None:
    libc, size, reported = ctypes.CDLL(None, use_errno=True), 1 << 28, ""
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for _ in range(20):  # it may be copied already
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as buffer:
            memory = torch.frombuffer(buffer, dtype=torch.uint8)
            staged: Any = FlowstoneStager().stage({"small": torch.ones(4), "m": {"w": memory}})
            end = memory.data_ptr() + size - (1 << 20)
            assert libc.mprotect(end, 1 << 20, PROT_NONE) == 0
            try:
                staged.keys()
            except fs.StateChangedError as error:
                reported = str(error)
            assert libc.mprotect(end, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE) == 0
            memory.fill_(1)  # no write waits any more
            del memory, staged
        if reported:
            break
    assert "the memory of 'm.w' was freed before it was staged" in reported


def test_without_a_guard_all_is_copied_at_once() -> None:
    stager, state = FlowstoneStager(guard=False), large(2)
    staged: Any = stager.stage(state)
    assert type(staged) is dict
    assert all(torch.equal(staged[name], tensor) for name, tensor in state.items())


def test_a_staged_state_waits_for_its_copies_at_the_first_look() -> None:
    looks: list[Any] = [
        len, list, dict, repr, pickle.dumps, lambda s: s["x"], lambda s: s.get("x"), lambda s: "x" in s,
        lambda s: s | {}, lambda s: s == {}, lambda s: s.copy(), lambda s: s.update(y=1), lambda s: {**s},
        lambda s: s.setdefault("x"),
    ]
    for look in looks:
        waits: list[int] = []
        staged = StagedState({"x": 1}, lambda waits=waits: waits.append(1))  # type: ignore[misc]
        look(staged)
        assert waits == [1]
    assert pickle.loads(pickle.dumps(StagedState({"x": 1}, lambda: None))) == {"x": 1}
    assert type(pickle.loads(pickle.dumps(StagedState({"x": 1}, lambda: None)))) is dict


def test_a_staged_state_is_handed_over_without_a_copy() -> None:
    staged: Any = FlowstoneStager().stage({"x": torch.ones(1000), "more": [torch.zeros(5, dtype=torch.int16)]})
    before = staged["x"].data_ptr()
    sent = pickle.loads(ForkingPickler.dumps(staged))
    assert staged["x"].data_ptr() == before
    staged["more"][0][2] = 7  # in memory that both have
    assert sent["more"][0].tolist() == [0, 0, 7, 0, 0]
    assert torch.equal(sent["x"], torch.ones(1000))


@pytest.mark.skipif(not hasattr(torch.distributed.checkpoint.state_dict_saver, "AsyncCheckpointerType"), reason="old")
def test_the_process_that_writes_maps_what_was_staged(tmp_path: Path) -> None:
    """Of DTensors, too: neither has it memory of its own for them, nor a copy that torch has shared."""
    for result in run(2, ACTS, "maps_of_writer", str(tmp_path)):
        assert result == [True, True, True]


def test_a_rank_that_has_nothing_of_a_tensor_stages_nothing() -> None:
    assert run(2, ACTS, "staged_nothing") == [[1, 3], [0, 3]]


def test_a_device_mesh_is_not_copied() -> None:
    assert run(1, ACTS, "staged_mesh") == [True]


def test_memory_is_used_again_once_nothing_holds_it() -> None:
    stager, state = FlowstoneStager(), {f"x{index}": torch.full((1000,), float(index)) for index in range(3)}
    first: Any = stager.stage(state)
    second: Any = stager.stage(state)  # while the first is in use
    used = addresses(first), addresses(second)
    assert not used[0] & used[1]
    kept = first["x1"]
    del first
    with pytest.raises(fs.BudgetError, match="earlier saves have used all staging memory"):
        FlowstoneStager._staged(stager_with(stager, deadline_s=0.05), state)
    del kept
    assert addresses(stager.stage(state)) == used[0]
    assert all(bool((tensor == index).all()) for index, tensor in enumerate(second.values()))


def stager_with(stager: FlowstoneStager, *, deadline_s: float) -> FlowstoneStager:
    stager._deadline_s = deadline_s
    return stager


def test_a_state_that_grows_gets_more_memory_and_a_budget_bounds_it() -> None:
    stager = FlowstoneStager(budget_bytes=1 << 20)
    for size in (10, 1 << 16, 10):
        staged: Any = stager.stage({"x": torch.full((size,), 3.0)})
        assert bool((staged["x"] == 3).all())
        del staged
    assert len(stager._buffers) == 1
    with pytest.raises(fs.BudgetError, match="does not fit into budget_bytes"):
        stager.stage({"x": torch.zeros(1 << 19)})


def test_staging_waits_for_memory_that_an_earlier_save_uses() -> None:
    stager, state = FlowstoneStager(), {"x": torch.ones(10)}
    held = [stager.stage(state), stager.stage(state)]
    threading.Timer(0.2, held.clear).start()
    stager.stage(state)
    assert not held, "it has let go of what it held"


def test_a_kind_of_tensor_that_cannot_be_staged_is_named() -> None:
    class Odd(torch.Tensor):
        pass

    with pytest.raises(fs.UnsupportedStateError, match=r"'a\.b' is a kind of tensor that cannot be staged"):
        FlowstoneStager().stage({"a": {"b": torch.ones(2).as_subclass(Odd)}})


def test_staging_in_the_background_is_a_future() -> None:
    stager = FlowstoneStager(in_background=True)
    future: Any = stager.stage({"x": torch.ones(3)})
    stager.synchronize_staging()
    assert future.result()["x"].tolist() == [1, 1, 1]
    stager.close()
    with pytest.raises(fs.ClosedError):
        stager.stage({"x": torch.ones(3)})


def test_steps_of_given_optimizers_wait_for_staging_in_the_background() -> None:
    model = nn.Linear(1 << 11, 1 << 11)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stager = FlowstoneStager(in_background=True, optimizers=[optimizer])
    for _ in range(5):
        model.weight.grad = torch.ones_like(model.weight)
        expected = model.weight.detach().clone()
        # Enough before the weight that a step which does not wait would change it first.
        future: Any = stager.stage({"before": large(4), "model": {"weight": model.weight}})
        optimizer.step()
        assert torch.equal(future.result()["model"]["weight"], expected)
    stager.close()
    optimizer.step()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_asynchronous_saves_hold_what_the_state_was(kind: str, tmp_path: Path) -> None:
    """Two ranks, three saves each by one writer; the state changes as soon as async_save has returned."""
    assert run(2, ACTS, "save_async", str(tmp_path), kind) == [[True, True, True]] * 2
    assert [fs.open(tmp_path / f"step-{step}").objects["step"] for step in (1, 2, 3)] == [1, 2, 3]
    assert all(fs.open(tmp_path / f"step-{step}").verify().sound for step in (1, 2, 3))


def test_a_failure_in_the_background_is_in_the_future(tmp_path: Path) -> None:
    (message,) = run(1, ACTS, "fail_async", str(tmp_path / "x"))
    assert "FlowstoneError" in str(message)
    assert "holds files that do not belong to a Flowstone checkpoint" in str(message)


@pytest.mark.parametrize("needs", ["staging_futures"], indirect=True)
@pytest.mark.usefixtures("needs")
def test_a_background_stager_gives_both_futures(tmp_path: Path) -> None:
    assert run(1, ACTS, "save_in_background", str(tmp_path / "step-4")) == [[4, [1.0, 1.0]]]
