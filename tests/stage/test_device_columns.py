"""Tensors on devices are read as columns, again at each save: without a call for each, and no change is missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from test_device_memory import opened

from bench.device_tensors import calls
from flowstone.state import describe
from simulated_device import SimulatedDevice, visible_device

MIB = 1 << 20
LONG = 20_000  # elements of a tensor that is captured lazily
PER_TENSOR = (
    "torch/tensors.py", "state/sink.py", "state/saving.py", "table/pieces.py", "/stage/", "/save/", "/load/",
    "/codecs/", "/coordination/", "/delta/", "/journal/", "/session/", "/plan/",
)


@pytest.fixture
def far() -> Iterator[SimulatedDevice]:
    with visible_device(SimulatedDevice(64 * MIB)) as device:
        yield device


def trained(far: SimulatedDevice, parameters: int, elements: int = 4) -> dict[str, object]:
    """A model on the device with its Adam, whose counts of steps are there as well."""
    model = torch.nn.ParameterList([far.tensor(torch.randn(elements)) for _ in range(parameters)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for slots in optimizer.state.values():
        slots.update({name: far.tensor(slot) for name, slot in slots.items()})
    return {"model": model, "optimizer": optimizer}


def calls_of_a_later_save(store: Path, state: dict[str, object]) -> Counter[str]:
    """Of functions in which tensors are looked at, and by these."""
    counts: Counter[str] = Counter()
    for (file, name), count in calls(state, store).items():
        if any(part in file for part in PER_TENSOR):
            counts[f"{file.rpartition('flowstone/')[2]} {name}"] += count
    return counts


def test_a_later_save_calls_nothing_for_each_tensor_on_a_device(tmp_path: Path, far: SimulatedDevice) -> None:
    few = calls_of_a_later_save(tmp_path / "few", trained(far, 50))
    many = calls_of_a_later_save(tmp_path / "many", trained(far, 450))
    counted = ("torch/tensors.py columns", "stage/capture.py resolve_device_memory", "stage/gather.py gather_for")
    for name in counted:
        assert many[name], "what acts on another thread than the caller's is counted, too"
    assert {name for name, count in many.items() if count - few[name] >= 400} == set()


def test_a_save_launches_one_kernel_and_copies_no_small_tensor(store: Path, far: SimulatedDevice) -> None:
    state = trained(far, 450)
    with opened(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        launches, copies = far.native.launches, far.native.copies
        state["optimizer"].step()  # type: ignore[attr-defined]
        checkpointer.save(2, state).committed.result().verify()
    assert far.native.launches == launches + 1
    assert far.native.copies == copies


Change = Callable[[dict[str, object], SimulatedDevice, SimulatedDevice], None]


def _other_data(state: dict[str, object], far: SimulatedDevice, _: SimulatedDevice) -> None:
    state["model"][0].data = far.tensor(torch.randn(LONG))  # type: ignore[index]


def _to_the_host(state: dict[str, object], *_: SimulatedDevice) -> None:
    state["model"][0].data = torch.randn(LONG)  # type: ignore[index]


def _to_another_device(state: dict[str, object], _: SimulatedDevice, other: SimulatedDevice) -> None:
    state["model"][0].data = other.tensor(torch.randn(LONG))  # type: ignore[index]


def _set(state: dict[str, object], far: SimulatedDevice, _: SimulatedDevice) -> None:
    with torch.no_grad():
        state["model"][0].set_(far.tensor(torch.randn(LONG)))  # type: ignore[index]


def _shorter(state: dict[str, object], *_: SimulatedDevice) -> None:
    state["model"][0].data.resize_(LONG // 2)  # type: ignore[index]


def _turned(state: dict[str, object], far: SimulatedDevice, _: SimulatedDevice) -> None:
    state["model"][0].data = far.tensor(torch.randn(LONG // 100, 100)).t()  # type: ignore[index]


def _swapped(state: dict[str, object], *_: SimulatedDevice) -> None:
    first, other = list(state["model"])[:2]  # type: ignore[call-overload]
    first.data, other.data = other.data, first.data


def _loaded(state: dict[str, object], *_: SimulatedDevice) -> None:
    model, optimizer = state["model"], state["optimizer"]
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})  # type: ignore[attr-defined]
    optimizer.load_state_dict(optimizer.state_dict())  # type: ignore[attr-defined]


def _new_slots(state: dict[str, object], far: SimulatedDevice, _: SimulatedDevice) -> None:
    for slots in state["optimizer"].state.values():  # type: ignore[attr-defined]
        slots["exp_avg"] = far.tensor(torch.randn(LONG))


def _new_objects(state: dict[str, object], far: SimulatedDevice, _: SimulatedDevice) -> None:
    """The same addresses, lengths and names: other tensors."""
    last = list(state["optimizer"].state.values())[-1]  # type: ignore[attr-defined]
    count = last["exp_avg_sq"]
    far.free(count)
    last["exp_avg_sq"] = far.tensor(torch.randn(LONG))
    assert last["exp_avg_sq"].data_ptr() == count.data_ptr()


CHANGES = [
    _other_data, _to_the_host, _to_another_device, _set, _shorter, _turned, _swapped, _loaded, _new_slots, _new_objects
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_memory_that_changed_between_two_saves_is_read_where_it_is(store: Path, change: Change) -> None:
    with visible_device(SimulatedDevice(16 * MIB), SimulatedDevice(16 * MIB, name="delayed:1")) as far:
        other = _far_of("delayed:1")
        state = trained(far, 3, LONG)
        with opened(store) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, state).committed.result()
            change(state, far, other)
            saved = checkpointer.save(3, state).committed.result()
            saved.verify()
            for name, tensor in _tensors(state).items():
                assert torch.equal(saved.read(name), tensor), name


def _far_of(name: str) -> SimulatedDevice:
    from flowstone.stage.device import side_stream

    result = side_stream(name)
    assert isinstance(result, SimulatedDevice)
    return result


def _tensors(state: dict[str, object]) -> dict[str, torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    result = {f"model.{number}": parameter.detach() for number, parameter in enumerate(model)}  # type: ignore[arg-type]
    for index, slots in enumerate(optimizer.state.values()):  # type: ignore[attr-defined]
        result |= {f"optimizer.state.model.{index}.{name}": slot for name, slot in slots.items()}
    return result


def test_each_device_has_a_number_and_a_name(far: SimulatedDevice) -> None:
    state = {"a": torch.ones(3), "b": far.tensor(torch.ones(4)), "c": far.tensor(torch.ones(4, 3)).t()}
    with visible_device(far, other := SimulatedDevice(MIB, name="delayed:1")):
        places = describe({**state, "d": other.tensor(torch.ones(2)), "e": torch.ones(2, 2).t()}).places
    assert (places.devices, places.device.tolist()) == (("delayed:0", "delayed:1"), [-1, 0, 0, 1, -1])
    assert sorted(places.strided) == [2, 4]
    assert places.host_runs.tolist() == [True, False, False, False, False]
    some = places.take([0, 3])
    assert (some.devices, some.device.tolist()) == (("delayed:1",), [-1, 0])
    assert places.take([0, 4]).devices == ()
    assert places.with_copies({1: (64, None), 2: (128, None)}).devices == ("delayed:1",)
