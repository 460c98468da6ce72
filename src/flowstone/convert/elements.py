"""Compare two ranges of elements: how many differ, and by how much. Uses only NumPy."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.convert.cast import CASTABLE, to_wide
from flowstone.table.dtype import DType

_BLOCK_ELEMENTS = 1 << 17  # each element takes a few times 16 bytes of temporary memory

_NAN_ABOVE = {"float64": 0x7FF0 << 48, "float32": 0x7F80 << 16, "float16": 0x7C00, "bfloat16": 0x7F80}
"""The bits of infinity; the bits of a NaN, without the sign, are larger numbers."""

_EIGHT_BITS = {"float8_e4m3fn": (4, 7), "float8_e4m3fnuz": (4, 8), "float8_e5m2": (5, 15), "float8_e5m2fnuz": (5, 16)}
"""The number of exponent bits, and the exponent's bias."""

_OTHER = ("float8_e8m0fnu", "bool", "complex64", "complex128")

Values = NDArray[Any]


class Tolerance(msgspec.Struct, frozen=True):
    """When two numbers count as equal, as in numpy.isclose: if |a - b| <= absolute + relative * |b|."""

    relative: float = 0.0
    absolute: float = 0.0


class Differences(msgspec.Struct, frozen=True):
    """The differences in a range of elements.

    unequal       number of elements that differ by more than the tolerance; a NaN equals a NaN, and 0 equals -0
    unequal_bits  number of elements whose bytes differ; if the types differ, the same as `unequal`
    absolute      the largest |a - b|; None if the types are not numeric
    relative      the largest |a - b| / max(|a|, |b|)
    largest_index  row-major index of the element with the largest |a - b|; None if all are equal
    nans          number of NaNs on each side
    """

    unequal: int = 0
    unequal_bits: int = 0
    absolute: float | None = 0.0
    relative: float | None = 0.0
    largest_index: int | None = None
    nans: tuple[int, int] = (0, 0)

    def merged_with(self, later: Differences) -> Differences:
        """The differences of this range and the next one together."""
        is_larger = later.largest_index is not None and (
            self.largest_index is None or (later.absolute or 0) > (self.absolute or 0)
        )
        return Differences(
            self.unequal + later.unequal, self.unequal_bits + later.unequal_bits,
            _larger(self.absolute, later.absolute), _larger(self.relative, later.relative),
            later.largest_index if is_larger else self.largest_index,
            (self.nans[0] + later.nans[0], self.nans[1] + later.nans[1]),
        )


def _larger(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else max(a, b)


def compare(
    a: NDArray[np.uint8], b: NDArray[np.uint8], kinds: tuple[DType, DType], tolerance: Tolerance, first: int = 0
) -> Differences:
    """Compare two buffers that have the same number of elements, of the types `kinds`. `first`: the index of their
    first element in the tensor.
    """
    sizes = kinds[0].item_bytes, kinds[1].item_bytes
    count = len(a) // sizes[0]
    assert len(b) // sizes[1] == count, "both sides have the same number of elements"
    differences = Differences() if all(map(has_numbers, kinds)) else Differences(absolute=None, relative=None)
    for begin in range(0, count, _BLOCK_ELEMENTS):
        end = min(count, begin + _BLOCK_ELEMENTS)
        block = (a[begin * sizes[0] : end * sizes[0]], b[begin * sizes[1] : end * sizes[1]])
        differences = differences.merged_with(_compare_block(block, kinds, tolerance, first + begin))
    return differences


def has_numbers(kind: DType) -> bool:
    """Whether the values of a type can be compared as numbers. If not, their bits are compared."""
    if kind.name in _NAN_ABOVE or kind.name in _EIGHT_BITS or kind.name in _OTHER:
        return True
    return kind.name.rstrip("0123456789") in ("int", "uint") and not kind.as_bytes


def _compare_block(
    block: tuple[NDArray[np.uint8], NDArray[np.uint8]], kinds: tuple[DType, DType], tolerance: Tolerance, first: int
) -> Differences:
    is_one_kind = kinds[0] is kinds[1]
    is_known = all(map(has_numbers, kinds))
    nans = (_nans(block[0], kinds[0]), _nans(block[1], kinds[1])) if is_known else (0, 0)
    unlike = _positions_of_unequal_bits(block[0], block[1], kinds[0].item_bytes) if is_one_kind else None
    if unlike is not None and not len(unlike):
        return Differences(nans=nans) if is_known else Differences(absolute=None, relative=None)
    if not is_known:
        count = len(unlike) if unlike is not None else len(block[0]) // kinds[0].item_bytes
        return Differences(count, count, None, None, None)
    pick = slice(None) if unlike is None else unlike
    with np.errstate(all="ignore"):
        x, y = (numbers(part, kind)[pick] for part, kind in zip(block, kinds, strict=True))
        unequal, absolute, relative, position = _largest_differences(x, y, tolerance)
    where = None if position is None else first + (position if unlike is None else int(unlike[position]))
    return Differences(unequal, unequal if unlike is None else len(unlike), absolute, relative, where, nans)


def _positions_of_unequal_bits(a: NDArray[np.uint8], b: NDArray[np.uint8], item: int) -> NDArray[np.intp]:
    """The positions of the elements whose bytes differ."""
    word = min(item, 8)
    kind = np.dtype(f"u{word}")
    unlike = a.view(kind) != b.view(kind)
    return np.flatnonzero(unlike if item == word else unlike.reshape(-1, item // word).any(axis=1))


def _largest_differences(x: Values, y: Values, tolerance: Tolerance) -> tuple[int, float, float, int | None]:
    """Returns the number of unequal elements, the largest absolute difference, the largest relative difference, and the
    index of the element with the largest absolute one.
    """
    is_same = (x == y) | (np.isnan(x) & np.isnan(y))
    distance = np.where(is_same, 0, np.abs(x - y))
    size = np.maximum(np.abs(x), np.abs(y))
    relative = np.where(is_same, 0, distance / np.where(size > 0, size, 1))
    is_finite = np.isfinite(x) & np.isfinite(y)
    is_near = is_finite & (distance <= tolerance.absolute + tolerance.relative * np.abs(y))
    unequal = len(x) - int(np.count_nonzero(is_same | is_near))
    if is_same.all():
        return unequal, 0.0, 0.0, None
    # if only one value is a NaN, there is no difference in numbers
    distance_known = np.where(np.isnan(distance), -1, distance)
    where = int(np.argmax(distance_known))
    return unequal, max(0.0, float(distance_known[where])), float(np.nanmax(np.where(is_finite, relative, 0))), where


def _nans(content: NDArray[np.uint8], kind: DType) -> int:
    above = _NAN_ABOVE.get(kind.name)
    if above is not None:
        bits = content.view(f"u{kind.item_bytes}")
        sign = bits.dtype.type((1 << 8 * kind.item_bytes - 1) - 1)
        return int(np.count_nonzero((bits & sign) > bits.dtype.type(above)))
    if kind.name.startswith(("complex", "float")):
        return int(np.count_nonzero(np.isnan(numbers(content, kind))))
    return 0


def numbers(content: NDArray[np.uint8], kind: DType) -> Values:
    """The values of elements as numbers, in a type that is wide enough for exact differences: integers become long
    doubles, with 64 bits of mantissa.
    """
    if kind.name in CASTABLE:
        with np.errstate(invalid="ignore"):  # signaling NaNs would cause a warning
            return to_wide(content.view(f"u{kind.item_bytes}"), kind).astype(np.float64)
    if kind.name in _EIGHT_BITS:
        return _eight_bit_values(kind.name)[content]
    if kind.name == "float8_e8m0fnu":
        return np.append(2.0 ** np.arange(-127, 128), np.nan)[content]
    if kind.name.startswith("complex"):
        return content.view(kind.name).astype(np.complex128)
    return content.view(kind.name).astype(np.longdouble)


def _eight_bit_values(name: str) -> NDArray[np.float64]:
    """The values of all 256 bytes in an 8-bit floating-point type. Most types are from the OCP standard; those with
    `fnuz` are from Graphcore and AMD.
    """
    exponent_bits, bias = _EIGHT_BITS[name]
    mantissa_bits = 7 - exponent_bits
    values = np.zeros(256)
    for byte in range(256):
        exponent, mantissa = byte % 128 >> mantissa_bits, byte % (1 << mantissa_bits)
        share = mantissa / (1 << mantissa_bits)
        value = math.ldexp(share, 1 - bias) if exponent == 0 else math.ldexp(1 + share, exponent - bias)
        values[byte] = -value if byte > 127 else value
    if name.endswith("fnuz"):
        values[128] = np.nan
    elif name == "float8_e4m3fn":
        values[[127, 255]] = np.nan
    else:
        values[[124, 252]] = np.inf, -np.inf
        values[[125, 126, 127, 253, 254, 255]] = np.nan
    return values
