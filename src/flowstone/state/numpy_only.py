"""The functions of the protocol `Framework` (`framework.py`) that are used if no framework is installed, or if this
package lacks the folder for it. Tensors of checkpoints are then loaded as numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowstone.format.objects import NamedConstant
from flowstone.state.memory import Columns, IndirectTarget, array_memory
from flowstone.table.dtype import DTYPES, DType
from flowstone.table.numpy_types import numpy_type
from flowstone.table.pieces import Alias, Memory

DENSE_TYPES: frozenset[type] = frozenset()
NO_TENSOR: Any = None
GENERATOR_TYPES: tuple[type, ...] = ()


def is_tensor(value: object) -> bool:
    return False


def columns(tensors: Sequence[Any], names: Sequence[str], *, hold: bool) -> Columns:
    """Columns with a placeholder (uint8, no dimensions, address 0) for each tensor. Without a framework, all tensors
    of a state are numpy arrays. The sink (the list of collected tensors, `sink.py`) already has the dtypes, shapes and
    addresses of arrays, and puts them in place of the placeholders.
    """
    count = len(tensors)
    return Columns(
        [DTYPES["uint8"]] * count, [()] * count, np.zeros(count, np.uint64), [None] * count,
        np.zeros(count, np.int64), (), np.zeros(0, np.int32), (),
    )


def memory_of(tensor: np.ndarray) -> Memory:
    return array_memory(tensor)


def resolved(tensor: np.ndarray) -> np.ndarray:
    return tensor


def detour(tensor: np.ndarray, dtype: DType) -> tuple[Memory, IndirectTarget, Callable[[], None]] | None:
    return None


def versions_of(tensors: Sequence[Any]) -> NDArray[np.int64]:
    """The same version number for every array, as numpy does not count changes."""
    return np.zeros(len(tensors), np.int64)


def count_as_written(tensors: Sequence[Any]) -> None:
    return None


def extent_of(owner: object) -> tuple[int, int] | None:
    return None


def empty(dtype: DType, shape: Sequence[int], *, device: Any = "cpu") -> np.ndarray:
    """A new array. Raises UnsupportedStateError if neither numpy nor ml_dtypes has the type."""
    return np.empty(tuple(shape), numpy_type(dtype))


def tensor_over(raw: np.ndarray, dtype: DType, shape: Sequence[int]) -> np.ndarray:
    """An array over the bytes of `raw`."""
    return raw.view(numpy_type(dtype)).reshape(tuple(shape))


def converted(tensor: np.ndarray, dtype: DType) -> np.ndarray:
    """The array with row-major elements of `dtype`."""
    return np.ascontiguousarray(tensor, numpy_type(dtype)).reshape(tensor.shape)


def constant_name(value: object) -> NamedConstant | None:
    return None


def constant(constant: NamedConstant, path: str) -> object:
    """Raises LookupError. The user never sees it: the caller, `constants.constant_of`, catches it. If the constant is
    not one of Python's either, `constant_of` raises an error with the constant's name and the remedy.
    """
    raise LookupError(constant.kind)


def generator_state(generator: Any) -> Any:
    raise NotImplementedError("without torch, there are no random generators of torch")


def set_generator_state(generator: Any, state: object) -> None:
    raise NotImplementedError("without torch, there are no random generators of torch")


def process_generators() -> Mapping[str, object]:
    return {}


def set_process_generators(state: Mapping[str, object]) -> None:
    """Do nothing: there are no generators."""


def generators_missing(node: object) -> int:
    return 0


def untie(state: Mapping[str, object], loading: Any, aliases: Sequence[Alias]) -> Sequence[int]:
    return ()
