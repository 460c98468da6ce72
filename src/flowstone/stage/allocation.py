"""New memory for a read: a tensor of torch, or an array of numpy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from flowstone.errors import ArgumentError, BudgetError
from flowstone.extensions import extension, find_extension
from flowstone.format.assemble import LiveValues
from flowstone.table.dtype import DType
from flowstone.table.pieces import Memory

if TYPE_CHECKING:
    import torch

    from flowstone.state.framework import Framework

    Allocator = Callable[[DType, tuple[int, ...]], tuple[torch.Tensor | np.ndarray, Memory]]


def allocator(framework: str | None) -> Allocator:
    """A function that makes a tensor (framework "torch") or array ("numpy") with undefined content, and returns it with
    its memory. None: a tensor if torch is installed and the folder `torch/` of this package exists, otherwise an array.

    raises  FrameworkError if a tensor was requested and cannot be made; ArgumentError for an unknown framework.
            The returned function raises BudgetError if memory runs out, UnsupportedStateError if numpy lacks the type
    """
    if framework not in (None, "torch", "numpy"):
        raise ArgumentError(f"framework {framework!r} is neither 'torch' nor 'numpy'", next="give one of them")
    if framework == "numpy":
        return _new_array
    functions = extension("torch.framework") if framework == "torch" else _find_torch()
    return _new_array if functions is None else partial(_new_tensor, functions)


def _find_torch() -> Framework | None:
    """The functions of torch; None if it is not installed, or the folder `torch/` of this package was deleted."""
    is_installed = sys.modules.get("torch") is not None or find_spec("torch") is not None
    return find_extension("torch.framework") if is_installed else None


def _new_tensor(functions: Framework, dtype: DType, shape: tuple[int, ...]) -> tuple[torch.Tensor, Memory]:
    try:
        result = functions.empty(dtype, shape)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when memory runs out
        raise _no_memory(dtype, shape) from error
    return result, functions.memory_of(result)


def _new_array(dtype: DType, shape: tuple[int, ...]) -> tuple[np.ndarray, Memory]:
    from flowstone.table.numpy_types import numpy_type  # imported here: most processes have torch

    try:
        array = np.empty(shape, numpy_type(dtype))
    except MemoryError as error:
        raise _no_memory(dtype, shape) from error
    return array, Memory(array, array.ctypes.data, array.shape, array.strides, array.itemsize)


def live_values() -> LiveValues:
    """Functions that make constants (such as dtypes), and objects of registered classes, from their stored form.
    Without torch, no functions are returned.
    """
    if _find_torch() is None:
        return LiveValues()
    from flowstone.state.classes import form_of_node, make_object
    from flowstone.state.constants import constant_of

    return LiveValues(constant_of, lambda node, build: None if form_of_node(node) is None else make_object(node, build))


def _no_memory(dtype: DType, shape: tuple[int, ...]) -> BudgetError:
    needed = math.prod(shape) * dtype.item_bytes
    return BudgetError(
        f"no memory for a tensor of {dtype.name} and shape {shape}",
        needed=f"{needed} bytes", next="read the tensor in parts (fs.Box), one after the other",
    )
