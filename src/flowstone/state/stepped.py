"""What optimizers' steps explain of a state: which parameters they step, by name, and which memory only they change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone._native import xxh3_64
from flowstone.format.journal import OptimizerRow
from flowstone.state.inner import is_optimizer, takes_hook
from flowstone.state.shards import is_dtensor
from flowstone.state.walk import scan
from flowstone.table.pieces import Pieces


def replayable(guarded: Iterable[object], unguarded: Sequence[str]) -> tuple[list[torch.optim.Optimizer], str]:
    """The optimizers of a state whose steps can be logged; and why not all can, "" if they can.

    guarded  every optimizer of the state, wrappers and inner ones too; `unguarded`: names of those without a hook
    """
    if unguarded:
        return [], f"no hook can be put on the step of '{unguarded[0]}'"
    found: list[torch.optim.Optimizer] = []
    for one in guarded:
        if isinstance(one, torch.optim.Optimizer):
            if not takes_hook(one):
                return [], f"{type(one).__name__} takes no hooks"
            found.append(one)
        elif not is_optimizer(one):
            return [], f"{type(one).__name__} is no optimizer of torch"
    if not found:
        return [], "the state has no optimizer"
    return found, ""


def optimizer_rows(
    state: Mapping[str, object], optimizers: Sequence[torch.optim.Optimizer], rank: int
) -> tuple[tuple[OptimizerRow, ...], str]:
    """The optimizers by the names of their parameters; and why that cannot be, "" if it can."""
    parameters = scan(state, rank).parameters()
    rows = []
    for optimizer in optimizers:
        groups = []
        for group in optimizer.param_groups:
            homes = [parameters.home(parameter) for parameter in group["params"]]
            if any(home is None or home.held is not None for home in homes):
                return (), f"a parameter of {type(optimizer).__name__} is in no module of the state, or a part of one"
            groups.append(tuple(home.path for home in homes if home is not None))
        rows.append(OptimizerRow(type(optimizer).__name__, tuple(groups)))
    return tuple(rows), ""


def parameter_keys(rows: Sequence[OptimizerRow], pieces: Pieces, rank: int) -> NDArray[np.uint64]:
    """For each parameter, one optimizer behind the other, a number: equal on all ranks that hold the same boxes of it,
    and step it by the optimizer of the same number. No other rank has that of a parameter that is not in `pieces`.
    """
    boxes: dict[str, list[str]] = {}
    for at, name in enumerate(pieces.names):
        boxes.setdefault(name, []).append(str(pieces.box(at)))
    keys = []
    for number, row in enumerate(rows):
        for name in chain(*row.groups):
            held = boxes.get(name, [f"of rank {rank}"])
            keys.append(xxh3_64("\0".join([str(number), name, *held]).encode()))
    return np.array(keys, np.uint64)


def stepped_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its parameters, group by group; acts number them in this order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def slots_of(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], list[object]]:
    """All tensors of its state, and all other values, in the order in which they are there."""
    tensors, others = list[torch.Tensor](), list[object]()
    waiting: list[object] = [*optimizer.state.values()][::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            waiting += reversed(value.values())
        elif isinstance(value, list | tuple):
            waiting += reversed(value)
        else:
            others.append(value)
    return tensors, others


def addresses_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[int]:
    """Where the tensors lie that the optimizers' steps change: their parameters, and all tensors of their states."""
    tensors = chain.from_iterable((*stepped_parameters(one), *slots_of(one)[0]) for one in optimizers)
    return [address_of(tensor) for tensor in tensors if tensor.numel()]


def addresses_in_place(optimizers: Iterable[torch.optim.Optimizer]) -> list[int]:
    """Those of them that a restoration writes to: of all others, as those in a list, it makes new tensors."""
    found = []
    for optimizer in optimizers:
        own = [own for key, own in optimizer.state.items() if isinstance(key, torch.Tensor) and isinstance(own, dict)]
        slots = chain.from_iterable(one.values() for one in own)
        found += [*stepped_parameters(optimizer), *(one for one in slots if isinstance(one, torch.Tensor))]
    return [address_of(tensor) for tensor in found if tensor.numel()]


def address_of(tensor: torch.Tensor) -> int:
    """Where what this rank holds of a tensor lies; 0 for one that has no memory of its own, as it is made of others."""
    try:
        return local(tensor).data_ptr()
    except RuntimeError:
        return 0


class Environment(NamedTuple):
    """With what steps are made: if all of it is the same, a replay is bit-exact."""

    torch: str
    processor: str
    threads: int


def environment(devices: Iterable[str]) -> Environment:
    """`devices`: that some of the state is on."""
    processors = torch.backends.cpu.get_cpu_capability(), *sorted({*map(_device_kind, devices)})
    return Environment(str(torch.__version__), "; ".join(processors), torch.get_num_threads())


def _device_kind(name: str) -> str:
    kind = name.partition(":")[0]
    return f"{torch.cuda.get_device_name(name)}, CUDA {torch.version.cuda}" if kind == "cuda" else kind
