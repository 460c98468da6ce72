"""Fresh memory for what is read: a tensor of torch, or an array of numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from flowstone.errors import ArgumentError, BudgetError, UnsupportedStateError
from flowstone.table.dtype import DType
from flowstone.table.pieces import Memory

if TYPE_CHECKING:
    import torch


def fresh(dtype: DType, shape: tuple[int, ...], framework: str) -> tuple[torch.Tensor | np.ndarray, Memory]:
    """A tensor of "torch", or an array of "numpy", with undefined content, and its memory.

    raises  BudgetError; UnsupportedStateError where numpy lacks the type; ArgumentError for another framework
    """
    if framework == "torch":
        from flowstone.state import tensors  # the one place where a reader needs torch

        try:
            result = tensors.empty(dtype, shape)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when memory runs out
            raise _no_memory(dtype, shape) from error
        return result, tensors.memory_of(result)
    if framework != "numpy":
        raise ArgumentError(f"framework {framework!r} is neither 'torch' nor 'numpy'", next="give one of them")
    try:
        array = np.empty(shape, dtype.name)
        if array.dtype.type.__module__ != "numpy":  # whatever other libraries have added to it in this process
            raise TypeError(array.dtype.type.__module__)
    except MemoryError as error:
        raise _no_memory(dtype, shape) from error
    except TypeError:
        raise UnsupportedStateError(
            f"numpy has no {dtype.name}", next="read it with framework='torch', or open the segment with safetensors"
        ) from None
    return array, Memory(array, array.ctypes.data, array.shape, array.strides, array.itemsize)


def _no_memory(dtype: DType, shape: tuple[int, ...]) -> BudgetError:
    needed = math.prod(shape) * dtype.item_bytes
    return BudgetError(
        f"no memory for a tensor of {dtype.name} and shape {shape}", needed=f"{needed} bytes",
        next="read it in boxes, one after the other",
    )
