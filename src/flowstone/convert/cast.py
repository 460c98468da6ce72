"""Convert between floating-point types with NumPy alone, which lacks bfloat16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.errors import ArgumentError
from flowstone.table.dtype import DTYPES, DType

CASTABLE = ("float64", "float32", "float16", "bfloat16")
"""The types that can be cast into each other. Tensors of any other type stay as they are."""

_NAMES = {"f64": "float64", "fp64": "float64", "f32": "float32", "fp32": "float32", "f16": "float16",
          "fp16": "float16", "bf16": "bfloat16"}
_BLOCK_ELEMENTS = 1 << 20  # elements of one block, whose temporary memory has at most 8 MiB


def cast_target(name: str | None) -> DType | None:
    """The type with this name; short forms such as "bf16" are allowed. None if `name` is None. Raises ArgumentError."""
    if name is None:
        return None
    full = _NAMES.get(name, name) if isinstance(name, str) else ""
    if full not in CASTABLE:
        raise ArgumentError(
            f"tensors cannot be cast to dtype {name!r:.60}", expected=", ".join(CASTABLE),
            next="leave the dtype out to keep every tensor as it is stored",
        )
    return DTYPES[full]


def cast(source: NDArray[np.generic], source_type: DType, target_type: DType) -> NDArray[np.generic]:
    """Convert a flat array to another type, rounding to nearest even. As NumPy lacks bfloat16, arrays of this type are
    uint16 with its bits.
    """
    return _from_wide(to_wide(source, source_type), target_type)


def cast_into(
    target: NDArray[np.generic], source: NDArray[np.generic], source_type: DType, target_type: DType
) -> None:
    """Convert an array into existing memory of the same shape, one block of elements after the other."""
    if source.ndim == 0 or source.size <= _BLOCK_ELEMENTS:
        target[...] = cast(source, source_type, target_type)
        return
    rows = max(1, _BLOCK_ELEMENTS * source.shape[0] // source.size)
    for begin in range(0, source.shape[0], rows):
        part = slice(begin, begin + rows)
        if rows == 1 and source.ndim > 1:
            cast_into(target[begin], source[begin], source_type, target_type)
        else:
            target[part] = cast(source[part], source_type, target_type)


def to_wide(values: NDArray[np.generic], kind: DType) -> NDArray[np.floating]:
    """The values of an array whose type is in CASTABLE, as float32; as float64 if the type is float64."""
    if kind.name == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind.name == "float16":
        return values.view(np.float16).astype(np.float32)
    return values.view(np.float64 if kind.name == "float64" else np.float32)


def _from_wide(values: NDArray[np.floating], kind: DType) -> NDArray[np.generic]:
    with np.errstate(over="ignore"):  # too large values become infinity, as in every tensor library
        if kind.name == "float64":
            return values.astype(np.float64).view(np.uint64)
        if kind.name == "float32":
            return values.astype(np.float32).view(np.uint32)
        if kind.name == "float16":
            return values.astype(np.float16).view(np.uint16)
        return _to_bfloat16(values)


def _to_bfloat16(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    narrow = np.ascontiguousarray(values, np.float32)
    bits = narrow.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    rounded_bits: NDArray[np.uint16] = (rounded >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(narrow)
    if nan.any():
        # a NaN stays a NaN, and is quiet
        rounded_bits[nan] = ((bits[nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return rounded_bits.reshape(np.shape(values))
