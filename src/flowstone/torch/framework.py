"""Implements the protocol `Framework` of `state/framework.py` for torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flowstone.errors import DamagedError
from flowstone.format.objects import NamedConstant
from flowstone.state.memory import IndirectTarget, overlaps_itself
from flowstone.table.dtype import DType
from flowstone.table.pieces import Alias, Memory
from flowstone.torch.generators import (
    GENERATOR_TYPES,
    generator_state,
    generators_missing,
    process_generators,
    set_generator_state,
    set_process_generators,
)
from flowstone.torch.tensors import (
    DENSE_TYPES,
    NO_TENSOR,
    columns,
    dtype_of,
    empty,
    is_deferred,
    memory_of,
    resolved,
    tensor_over,
    torch_dtype,
    versions_of,
)

if TYPE_CHECKING:
    from flowstone.state.loading import RestorePass

__all__ = [
    "DENSE_TYPES", "GENERATOR_TYPES", "NO_TENSOR", "columns", "constant", "constant_name", "converted", "copy_into",
    "count_as_written", "detour", "empty", "extent_of", "generator_state", "generators_missing", "is_tensor",
    "memory_of", "tensor_over", "process_generators", "resolved", "set_generator_state", "set_process_generators",
    "untie",
    "versions_of",
]
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def is_tensor(value: object) -> bool:
    """Whether `value` is a tensor, of any type."""
    return isinstance(value, torch.Tensor)


def extent_of(owner: object) -> tuple[int, int] | None:
    """Address and length, in bytes, of a storage; None if `owner` is not a storage."""
    return (owner.data_ptr(), owner.nbytes()) if isinstance(owner, torch.UntypedStorage) else None


def converted(tensor: torch.Tensor, dtype: DType) -> torch.Tensor:
    """The tensor with contiguous elements of `dtype`."""
    return (tensor if dtype_of(tensor) == dtype else tensor.to(torch_dtype(dtype))).contiguous()


def detour(tensor: torch.Tensor, dtype: DType) -> tuple[Memory, IndirectTarget, Callable[[], None]] | None:
    """New memory for a view with a conjugate or negative bit, and a function that copies it into the view."""
    if not is_deferred(tensor):
        return None
    aside = empty(dtype, tensor.shape, device=tensor.device)
    target = IndirectTarget(memory_of(tensor), tensor.is_conj(), tensor.is_neg())
    return memory_of(aside), target, partial(copy_into, tensor, aside)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements into a tensor, also an expanded one, for which torch refuses copy_()."""
    with torch.no_grad():
        for dim, stride in enumerate(target.stride()):
            if stride == 0 and target.numel():  # this dimension is expanded: all its entries are one
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        if not target.numel() or not overlaps_itself(memory_of(target)):
            target.copy_(source)
            return
        reach = sum((side - 1) * step for side, step in zip(target.shape, target.stride(), strict=True)) + 1
        flat = target.as_strided((reach,), (1,), target.storage_offset())
        index = torch.arange(reach, device=target.device).as_strided(target.shape, target.stride())
        flat[index.reshape(-1)] = source.reshape(-1)


def count_as_written(tensors: Sequence[torch.Tensor]) -> None:
    """Increment the tensors' version counters. A load writes their bytes without autograd, and a graph that has saved a
    tensor must notice that.
    """
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # inference tensors have no counter; incrementing the others' counters twice is harmless
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def constant_name(value: object) -> NamedConstant | None:
    """The stored name of a dtype, a layout, a memory format, a device or a size; None for any other value."""
    if isinstance(value, _CONSTANTS):
        return NamedConstant(f"torch.{type(value).__name__}", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return NamedConstant("torch.device", str(value))
    if type(value) is torch.Size:
        return NamedConstant("torch.Size", ",".join(map(str, value)))
    return None


def constant(constant: NamedConstant, path: str) -> object:
    """The constant of torch with that name. Raises LookupError if this version of torch lacks it."""
    kind, text = constant.kind, constant.text
    if kind in ("torch.dtype", "torch.layout", "torch.memory_format"):
        value: Any = getattr(torch, text, None)
        if isinstance(value, getattr(torch, kind.removeprefix("torch."))):
            return value
    elif kind == "torch.device" and re.fullmatch(r"[a-z]+(:[0-9]{1,9})?", text):
        try:
            return torch.device(text)
        except RuntimeError as error:
            raise LookupError(text) from error  # a device type that this torch does not know
    elif kind == "torch.Size":
        if not re.fullmatch(r"([0-9]{1,18}(,[0-9]{1,18})*)?", text):
            raise DamagedError(f"the object '{path}' is not a torch.Size", found=text, next="run `flowstone verify`")
        return torch.Size(int(n) for n in text.split(",") if n)
    raise LookupError(text)


def untie(state: Mapping[str, object], loading: RestorePass, aliases: Sequence[Alias]) -> Sequence[int]:
    """Request separate memory for each tied tensor in `aliases` that can be replaced in the state."""
    from flowstone.torch.untie import untie  # imported here: few states have such entries

    return untie(state, loading, aliases)
