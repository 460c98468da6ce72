"""Values of floating-point types as those of another, in numpy alone, which lacks bfloat16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.errors import ArgumentError
from flowstone.table.dtype import DTYPES, DType

CASTABLE = ("float64", "float32", "float16", "bfloat16")
"""What can be cast into each other. Tensors of any other type stay as they are."""

_NAMES = {"f64": "float64", "fp64": "float64", "f32": "float32", "fp32": "float32", "f16": "float16",
          "fp16": "float16", "bf16": "bfloat16"}
_BLOCK_ELEMENTS = 1 << 20  # of temporary memory: 8 MiB at most


def cast_target(name: str | None) -> DType | None:
    """The type that `name` says, short forms (bf16) included. Raises ArgumentError."""
    if name is None:
        return None
    full = _NAMES.get(name, name) if isinstance(name, str) else ""
    if full not in CASTABLE:
        raise ArgumentError(
            f"dtype {name!r:.60} is none that values are cast to", expected=", ".join(CASTABLE),
            next="leave it out to keep every tensor as it is stored",
        )
    return DTYPES[full]


def cast(source: NDArray[np.generic], source_type: DType, target_type: DType) -> NDArray[np.generic]:
    """The values of a flat array of the source's carrier type as carriers of the target's, rounded to nearest even."""
    return _from_wide(to_wide(source, source_type), target_type)


def cast_into(
    target: NDArray[np.generic], source: NDArray[np.generic], source_type: DType, target_type: DType
) -> None:
    """The same, of two arrays of one shape, into memory that is there; a block at a time."""
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
    """Carriers of a type of CASTABLE as float32, or float64 where it is that."""
    if kind.name == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind.name == "float16":
        return values.view(np.float16).astype(np.float32)
    return values.view(np.float64 if kind.name == "float64" else np.float32)


def _from_wide(values: NDArray[np.floating], kind: DType) -> NDArray[np.generic]:
    with np.errstate(over="ignore"):  # what is too large becomes infinite, as in every library of tensors
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
    found: NDArray[np.uint16] = (rounded >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(narrow)
    if nan.any():
        found[nan] = ((bits[nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)  # stays one, and quiet
    return found.reshape(np.shape(values))
