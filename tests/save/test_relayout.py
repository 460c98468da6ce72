"""States that change between saves: each checkpoint has the present state, whether its plan is reused or not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import flowstone as fs
from flowstone.events.phases import Event, SaveStarted
from flowstone.state import StateDescription, describe
from forge import memory_at
from strategies import raw_bytes, strided_bytes

PLAIN = fs.EngineOptions(backend="posix", direct="off", workers=1)
Row = tuple[str, object, bool]  # name, tensor or array, lazy


class Job:
    """A training job whose state is about to change in every way that these tests know."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.fresh = count()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        layers = [{"params": list(layer.parameters())} for layer in self.model]
        self.optimizer = torch.optim.AdamW(layers, 0.1)
        self.extra: dict[object, object] = {
            "a": torch.randn(5), "b": torch.randn(5), "m": torch.randn(3, 4), 7: torch.randn(2).bfloat16(),
            "large": torch.randn(20_000),
        }
        self.parts: object = [torch.randn(2), torch.randn(3)]
        self.state: dict[str, object] = {
            "model": self.model, "optimizer": self.optimizer, "extra": self.extra, "parts": self.parts, "step": 0,
        }

    def rows(self) -> list[Row]:
        """Every tensor with its name and whether it is lazy, in the order of the state: one by one, and by hand."""
        rows: list[Row] = []
        for section, value in self.state.items():
            if isinstance(value, nn.Module):
                rows += [
                    (f"{section}.{key.replace('module.', '')}", tensor, isinstance(tensor, nn.Parameter))
                    for key, tensor in value.state_dict(keep_vars=True).items()
                ]
            elif isinstance(value, torch.optim.Optimizer):
                names = {id(tensor): name for name, tensor, _ in reversed(rows)}
                for group in value.param_groups:
                    for parameter in group["params"]:
                        for slot, tensor in value.state.get(parameter, {}).items():
                            rows.append((f"{section}.state.{names[id(parameter)]}.{slot}", tensor, True))
            else:
                rows += [(name, tensor, False) for name, tensor in flat(value, section)]
        return rows

    def train(self) -> None:
        """One step of the optimizer, whatever dtype the parameters have by now; moments follow them."""
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
            slots = self.optimizer.state[parameter]
            slots.update({key: slots[key].to(parameter.dtype) for key in ("exp_avg", "exp_avg_sq") if key in slots})
        self.optimizer.step()
        self.state["step"] = int(self.state["step"]) + 1  # type: ignore[call-overload]

    def name(self) -> str:
        return f"new{next(self.fresh)}"


def flat(value: object, name: str) -> list[tuple[str, object]]:
    if isinstance(value, TwoTensor):
        return [(f"{name}.a", value.a), (f"{name}.b", value.b)]
    if isinstance(value, (torch.Tensor, np.ndarray, fs.Shard)):
        return [(name, value.tensor if isinstance(value, fs.Shard) else value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return [result for key, item in items for result in flat(item, f"{name}.{key}")]


def shown(value: object) -> tuple[str, tuple[int, ...], bytes]:
    """What a tensor or array shows, whatever its memory looks like."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().resolve_conj().resolve_neg()
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), raw_bytes(dense).tobytes()
    assert isinstance(value, np.ndarray)
    return value.dtype.name, value.shape, value.tobytes()


def memory(value: object) -> object:
    """Where a tensor lies; equal for two only if they are the same elements."""
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0], value.shape, value.strides, value.dtype.name
    assert isinstance(value, torch.Tensor)
    if value.is_neg() or value.is_conj():
        return object()
    item = value.element_size()
    strides = tuple(stride * item for stride in value.stride())
    return value.data_ptr(), tuple(value.shape), strides, str(value.dtype).removeprefix("torch.")


def layout(rows: list[Row]) -> list[object]:
    """What a plan depends on: names, dtypes, shapes and ties, in order."""
    first: dict[object, str] = {}
    collected: list[object] = []
    for name, value, lazy in rows:
        dtype, shape, _ = shown(value)
        owner = name if 0 in shape else first.setdefault(memory(value), name)
        collected.append((name, dtype, shape, lazy) if owner == name else (name, owner))
    return collected


# What may happen between two saves.


def replace_data(job: Job, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for parameter in job.model.parameters():
        parameter.data = change(parameter.data)


def swap_data(job: Job) -> None:
    weight, other = job.model[0].weight, nn.Parameter(torch.randn(4, 3))
    weight.data, other.data = other.data, weight.data


def exchange(job: Job) -> None:
    if {"a", "b"} <= job.extra.keys():
        job.extra["a"], job.extra["b"] = job.extra["b"], job.extra["a"]


def reorder(job: Job) -> None:
    if job.extra:
        key = next(iter(job.extra))
        job.extra[key] = job.extra.pop(key)


def rebuild_parts(job: Job) -> None:
    kind = tuple if isinstance(job.state["parts"], list) else list
    job.state["parts"] = kind(job.state["parts"])  # type: ignore[call-overload]


def wrap(job: Job) -> None:
    wrapper = nn.Module()
    wrapper.module = job.state["model"]
    job.state["model"] = wrapper


def hook(job: Job) -> None:
    job.model[0].register_state_dict_post_hook(lambda module, entries, prefix, metadata: None)


def grow(job: Job) -> None:
    name = job.name()
    job.model.register_parameter(name, nn.Parameter(torch.randn(2)))
    job.optimizer.add_param_group({"params": [getattr(job.model, name)], "lr": 0.5})


def tie_weights(job: Job) -> None:
    job.model.register_parameter(job.name(), job.model[2].bias)


def flip_grads(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def put(make: Callable[[], object], key: object = None) -> Callable[[Job], None]:
    return lambda job: job.extra.__setitem__(job.name() if key is None else key, make())


def tie(job: Job) -> None:
    job.extra[job.name()] = job.extra.get("a", job.model[0].weight)


CHANGES: dict[str, Callable[[Job], object]] = {
    "a step of training": lambda job: job.train(),
    "nothing": lambda job: None,
    "parameters reallocated": lambda job: replace_data(job, torch.clone),
    "parameters converted": lambda job: replace_data(job, lambda data: data.bfloat16()),
    "a parameter's data swapped": swap_data,
    "requires_grad flipped": flip_grads,
    "two tensors exchanged": exchange,
    "a tensor of another dtype": put(lambda: torch.randn(5).double(), "a"),
    "a tensor of another shape": put(lambda: torch.randn(6), "a"),
    "a tensor reallocated": put(lambda: torch.randn(5), "a"),
    "a tensor resized in place": lambda job: job.parts[0].resize_(9).fill_(1),  # type: ignore[index]
    "a tensor turned around": put(lambda: torch.randn(4, 3).t(), "m"),
    "a tensor turned back": put(lambda: torch.randn(3, 4), "m"),
    "a conjugate view": put(lambda: torch.randn(2, dtype=torch.complex64).conj(), "z"),
    "what it is a view of": put(lambda: torch.randn(2, dtype=torch.complex64), "z"),
    "a negative view": put(lambda: torch.randn(2, dtype=torch.complex64).conj().imag, "n"),
    "a view inside a storage": put(lambda: torch.randn(9)[3:7]),
    "an empty tensor": put(lambda: torch.zeros(0, 2)),
    "a scalar": put(lambda: torch.tensor(1.5)),
    "an array": put(lambda: np.arange(3.0), "array"),
    "an array backwards": put(lambda: np.arange(3.0)[::-1], "array"),
    "a shard that is the whole": put(lambda: fs.Shard(torch.randn(2, 2), (2, 2), (0, 0)), "shard"),
    "a tensor of two": put(lambda: TwoTensor(torch.randn(2), torch.randn(2)), "two"),
    "a tensor of two whose parts are others": put(lambda: TwoTensor(torch.randn(3), torch.randn(3)), "two"),
    "a parameter outside a module": put(lambda: nn.Parameter(torch.randn(3))),
    "a nested container": put(lambda: {"x": [torch.randn(1), 5], "y": (torch.randn(2),)}),
    "a value beside tensors": put(lambda: "text", "text"),
    "a tie": tie,
    "a tensor gone": lambda job: job.extra.pop(next(reversed(job.extra)), None),
    "another order": reorder,
    "another kind of container": rebuild_parts,
    "a wrapper": wrap,
    "a hook": hook,
    "a buffer more": lambda job: job.model.register_buffer(job.name(), torch.randn(2)),
    "a buffer that is not saved": lambda job: job.model.register_buffer(job.name(), torch.ones(2), persistent=False),
    "a parameter more": grow,
    "tied weights": tie_weights,
    "slots gone": lambda job: job.optimizer.state.pop(job.model[0].weight, None),
    "groups in another order": lambda job: job.optimizer.param_groups.reverse(),
    "another learning rate": lambda job: job.optimizer.param_groups[0].update(lr=0.3),
    "another section": lambda job: job.state.update(late=torch.randn(3)),
}


def check(store: object, job: Job, step: int) -> None:
    checkpoint = fs.open(store, step, engine=PLAIN)  # type: ignore[arg-type]
    values = {name: value for name, value, _ in job.rows()}
    assert set(checkpoint.tensors) == values.keys()
    stored = {name: shown(tensor) for name, tensor in checkpoint.stream()}  # one engine for all but ties
    stored |= {name: shown(checkpoint.read(name)) for name in values.keys() - stored.keys()}
    assert stored == {name: shown(value) for name, value in values.items()}
    assert checkpoint.objects["step"] == job.state["step"]


def play(store: object, changes: list[str]) -> None:
    job, told = Job(), list[Event]()
    before: tuple[object, ...] | None = None
    with fs.Checkpointer(store, engine=PLAIN, on_event=told.append, keep=fs.Keep(last=1)) as checkpointer:  # type: ignore[arg-type]
        for step, change in enumerate(["nothing", *changes]):
            CHANGES[change](job)
            checkpointer.save(step, job.state).committed.result()
            check(store, job, step)
            plan = checkpointer._saves._planner.last
            assert plan is not None
            now = layout(job.rows()), plan.plan.unchanged.tolist()  # a part of the plan
            cached = [event.plan_cached for event in told if isinstance(event, SaveStarted)][-1]
            assert cached == (now == before), change
            before = now


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_saves_is_in_the_checkpoint(change: str, memory_path: Path) -> None:
    play(Path(mkdtemp(dir=memory_path)) / "s", ["a step of training", "nothing", change, "nothing", change])


@settings(max_examples=25, deadline=None)
@given(changes=st.lists(st.sampled_from(sorted(CHANGES)), min_size=2, max_size=8))
def test_any_changes_between_saves_are_in_the_checkpoints(memory_path: Path, changes: list[str]) -> None:
    play(Path(mkdtemp(dir=memory_path)) / "s", changes)


def bytes_of(described: StateDescription) -> list[bytes]:
    """The elements of each piece, from where it lies."""
    return [
        strided_bytes(tensor.address, tensor.shape, tensor.strides_bytes, tensor.item_bytes).tobytes()
        for tensor in memory_at(described.pieces, described.places)
    ]


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=8))
def test_a_description_that_knows_the_layout_is_the_one_that_does_not(changes: list[str]) -> None:
    job = Job()
    job.train()
    known = describe(job.state).layout
    for change in changes:
        CHANGES[change](job)
        first, other = describe(job.state, known=known), describe(job.state)
        assert first.layout == other.layout
        assert (first.layout is known) == (other.layout == known)
        assert bytes_of(first) == bytes_of(other)
        assert (first.objects, first.optimizers) == (other.objects, other.optimizers)
        known = first.layout
