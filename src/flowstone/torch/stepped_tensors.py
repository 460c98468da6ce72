"""Finds the parameters that a state's optimizers step, and the memory that only these steps change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone._native import xxh3_64
from flowstone.table.pieces import Pieces
from flowstone.torch.inner_optimizers import has_step_hooks, is_optimizer
from flowstone.torch.shards import is_dtensor

if TYPE_CHECKING:
    from flowstone.journal.journal_format import OptimizerRow


def find_replayable_optimizers(
    guarded: Iterable[object], unguarded: Sequence[str]
) -> tuple[list[torch.optim.Optimizer], str]:
    """The optimizers of a state, if all their steps can be journaled, and ""; otherwise none, and the reason.

    guarded    every optimizer of the state, wrappers and inner ones included
    unguarded  names of optimizers whose steps cannot be noticed, as no hook can be installed
    """
    if unguarded:
        return [], f"no hook can be put on the step of '{unguarded[0]}'"
    optimizers: list[torch.optim.Optimizer] = []
    for optimizer in guarded:
        if isinstance(optimizer, torch.optim.Optimizer):
            if not has_step_hooks(optimizer):
                return [], f"{type(optimizer).__name__} takes no hooks"
            optimizers.append(optimizer)
        elif not is_optimizer(optimizer):
            return [], f"{type(optimizer).__name__} is not an optimizer of torch"
    if not optimizers:
        return [], "the state has no optimizer"
    return optimizers, ""


def parameter_keys(rows: Sequence[OptimizerRow], pieces: Pieces, rank: int) -> NDArray[np.uint64]:
    """A key for each parameter, one optimizer after the other. The keys of a parameter on two ranks are equal if both
    ranks have the same boxes of it, and its optimizer has the same number on both. Keys of parameters that are not in
    `pieces` are unique to the rank.
    """
    boxes: dict[str, list[str]] = {}
    for position, name in enumerate(pieces.names):
        boxes.setdefault(name, []).append(str(pieces.box(position)))
    keys = []
    for number, row in enumerate(rows):
        for name in chain(*row.groups):
            held = boxes.get(name, [f"of rank {rank}"])
            keys.append(xxh3_64("\0".join([str(number), name, *held]).encode()))
    return np.array(keys, np.uint64)


def stepped_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer, group by group. Journals number parameters in this order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor; any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def slots_of(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], list[object]]:
    """All tensors in an optimizer's state, and all other values in it, in order."""
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
    """The addresses of tensors that optimizer steps change: parameters, and all tensors of optimizer state."""
    tensors = chain.from_iterable((*stepped_parameters(optimizer), *slots_of(optimizer)[0]) for optimizer in optimizers)
    return [address_of(tensor) for tensor in tensors if tensor.numel()]


def addresses_in_place(optimizers: Iterable[torch.optim.Optimizer]) -> list[int]:
    """Of the tensors that optimizer steps change, the addresses of those that a load writes in place. A load creates
    the others anew.
    """
    tensors = []
    for optimizer in optimizers:
        own = [own for key, own in optimizer.state.items() if isinstance(key, torch.Tensor) and isinstance(own, dict)]
        slots = chain.from_iterable(slot_values.values() for slot_values in own)
        tensors += [*stepped_parameters(optimizer), *(slot for slot in slots if isinstance(slot, torch.Tensor))]
    return [address_of(tensor) for tensor in tensors if tensor.numel()]


def address_of(tensor: torch.Tensor) -> int:
    """The address of this rank's part of a tensor; 0 for a tensor that consists of other tensors."""
    try:
        return local_tensor(tensor).data_ptr()
    except RuntimeError:
        return 0


class Environment(NamedTuple):
    """The versions and hardware with which steps were computed. If all of these are equal, a replay is bit-exact."""

    torch: str
    processor: str
    threads: int


def environment(devices: Iterable[str]) -> Environment:
    """The Environment (versions and hardware) of this process. `devices`: the devices of the state."""
    processors = torch.backends.cpu.get_cpu_capability(), *sorted({*map(_device_kind, devices)})
    return Environment(str(torch.__version__), "; ".join(processors), torch.get_num_threads())


def _device_kind(name: str) -> str:
    kind = name.partition(":")[0]
    return f"{torch.cuda.get_device_name(name)}, CUDA {torch.version.cuda}" if kind == "cuda" else kind
