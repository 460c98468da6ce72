"""Fresh memory for what is read: a tensor of torch, or an array of numpy."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from flowstone.errors import ArgumentError, BudgetError, FrameworkError, UnsupportedStateError
from flowstone.format.assemble import LiveValues
from flowstone.table.dtype import DType
from flowstone.table.pieces import Memory

if TYPE_CHECKING:
    import torch


def fresh(dtype: DType, shape: tuple[int, ...], framework: str | None) -> tuple[torch.Tensor | np.ndarray, Memory]:
    """A tensor of "torch", or an array of "numpy", with undefined content, and its memory; None: see `has_torch`.

    raises  BudgetError; UnsupportedStateError where numpy lacks the type; FrameworkError where torch is not installed;
            ArgumentError for another framework
    """
    if framework == "torch" or (framework is None and has_torch()):
        need_torch("a tensor of torch")
        from flowstone.state import tensors  # the one place where a reader needs torch

        try:
            result = tensors.empty(dtype, shape)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when memory runs out
            raise _no_memory(dtype, shape) from error
        return result, tensors.memory_of(result)
    if framework not in (None, "numpy"):
        raise ArgumentError(f"framework {framework!r} is neither 'torch' nor 'numpy'", next="give one of them")
    try:
        array = np.empty(shape, _numpy_type(dtype))
    except MemoryError as error:
        raise _no_memory(dtype, shape) from error
    return array, Memory(array, array.ctypes.data, array.shape, array.strides, array.itemsize)


def has_torch() -> bool:
    """Whether torch is installed; without it, reads return numpy arrays."""
    return sys.modules.get("torch") is not None or find_spec("torch") is not None


def need_torch(what: str) -> None:
    """Raise FrameworkError if torch is not installed."""
    if not has_torch():
        raise FrameworkError(f"{what} needs torch, which is not installed", next="pip install 'flowstone[torch]'")


def live_values() -> LiveValues:
    """What makes constants, and objects of registered classes, of what is stored of them; nothing does without torch.
    """
    if not has_torch():
        return LiveValues()
    from flowstone.state.classes import form_of_node, make
    from flowstone.state.constants import value_of

    return LiveValues(value_of, lambda node, build: None if form_of_node(node) is None else make(node, build))


def _numpy_type(dtype: DType) -> np.dtype[Any]:
    """Of numpy's own, or of ml_dtypes, which has the others. Raises UnsupportedStateError."""
    try:
        found = np.dtype(dtype.name)
        if found.type.__module__ == "numpy":  # another library may have added it in this process, or in no other one
            return found
    except TypeError:
        pass
    others = import_module("ml_dtypes") if find_spec("ml_dtypes") else None
    other: type[Any] | None = getattr(others, dtype.name, None)
    if other is None or np.dtype(other).itemsize != dtype.item_bytes:
        raise UnsupportedStateError(
            f"numpy has no {dtype.name}", next="pip install ml_dtypes, or read it with framework='torch'"
        )
    return np.dtype(other)


def _no_memory(dtype: DType, shape: tuple[int, ...]) -> BudgetError:
    needed = math.prod(shape) * dtype.item_bytes
    return BudgetError(
        f"no memory for a tensor of {dtype.name} and shape {shape}", needed=f"{needed} bytes",
        next="read it in boxes, one after the other",
    )
