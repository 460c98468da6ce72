"""The memory of numpy arrays, and the table of all memory that a walk over a state has found. Independent of the
framework.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.format.objects import unsupported_error
from flowstone.table.dtype import DTYPES, DType
from flowstone.table.pieces import Memory

_NUMPY_NAMES = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_ARRAY_TYPES = (np.ndarray, np.memmap)


class Columns(msgspec.Struct, frozen=True, eq=False):
    """Properties of tensors, one entry for each.

    address  address of element (0, ..., 0)
    owners   objects that keep the memory alive
    versions version counters, see `Framework.versions_of`; only if the argument `hold` of `Framework.columns` was True
    odd      positions, ascending, of tensors that are not contiguous, or whose memory has other values than they show
             (conjugate or negative bit)
    device   index of each tensor's device in `devices`; -1: host memory. Empty if there are no devices
    """

    dtypes: Sequence[DType]
    shapes: Sequence[tuple[int, ...]]
    address: NDArray[np.uint64]
    owners: Sequence[object]
    versions: NDArray[np.int64]
    odd: Sequence[int]
    device: NDArray[np.int32]
    devices: tuple[str, ...]


class IndirectTarget(msgspec.Struct, frozen=True, eq=False):
    """Memory of the state whose values are first read into other memory, and then copied.

    is_conj, is_neg  whether the state's memory has the conjugate, or the negated, values
    """

    memory: Memory
    is_conj: bool = False
    is_neg: bool = False


def check_array(array: np.ndarray, name: str) -> DType:
    """The dtype of a numpy array. Raises UnsupportedStateError unless its elements are numbers in native byte order."""
    if type(array) in _ARRAY_TYPES and array.dtype.isnative and array.dtype.name in _NUMPY_NAMES:
        return DTYPES[array.dtype.name]
    if type(array) not in _ARRAY_TYPES:
        raise unsupported_error(
            name, array, "is a kind of array that cannot be stored", "convert it with numpy.asarray()"
        )
    raise unsupported_error(
        name,
        array,
        f"has dtype {array.dtype.str}",
        "convert it with astype() to a native bool, integer, float16 to float64 or complex type, or with tolist()",
    )


def array_memory(array: np.ndarray) -> Memory:
    """The memory of an array; strides may be negative."""
    return Memory(array, array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)


def ascending(array: np.ndarray) -> np.ndarray:
    """The array itself; or, if a stride is negative, a copy, as memory is only read in the direction of ascending
    addresses.
    """
    return array.copy(order="C") if any(stride < 0 for stride in array.strides) else array


def writable(array: np.ndarray) -> np.ndarray | None:
    """The array if it is writable. For a read-only view of writable memory, a writable view. None if the memory itself
    is read-only.
    """
    if array.flags.writeable:
        return array
    view = array.view()
    try:
        view.setflags(write=True)
    except ValueError:
        return None
    return view


def overlaps_itself(memory: Memory) -> bool:
    """Whether two elements may share bytes, so that writing one changes the other.

    May be True for unusual interleaved strides without shared bytes.
    """
    if memory.contiguous:
        return False
    reach = memory.item_bytes  # length of the range of addresses that the dimensions so far cover
    for stride, length in sorted(zip(map(abs, memory.strides_bytes), memory.shape, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach += stride * (length - 1)
    return False


def numpy_has(dtype: DType) -> bool:
    """Whether numpy has a dtype of that name."""
    return dtype.name in _NUMPY_NAMES
