"""Two runs of elements side by side: how many are unequal, and by how much. In numpy alone."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.convert.cast import CASTABLE, to_wide
from flowstone.table.dtype import DType

_BLOCK_ELEMENTS = 1 << 17  # of temporary memory: 16 bytes for each, a few times

_NAN_ABOVE = {"float64": 0x7FF0 << 48, "float32": 0x7F80 << 16, "float16": 0x7C00, "bfloat16": 0x7F80}
"""The bits of infinity: those of a NaN, without the sign, are larger."""

_EIGHT_BITS = {"float8_e4m3fn": (4, 7), "float8_e4m3fnuz": (4, 8), "float8_e5m2": (5, 15), "float8_e5m2fnuz": (5, 16)}
"""Bits of the exponent, and its bias."""

_OTHER = ("float8_e8m0fnu", "bool", "complex64", "complex128")

Values = NDArray[Any]


class Tolerance(msgspec.Struct, frozen=True):
    """As numpy.isclose has it: |a - b| <= absolute + relative * |b|."""

    relative: float = 0.0
    absolute: float = 0.0


class Differences(msgspec.Struct, frozen=True):
    """What differs in a run of elements.

    unequal       beyond the tolerance; a NaN equals a NaN, and 0 equals -0
    unequal_bits  whose bytes differ; of two types, the same as `unequal`
    absolute      the largest |a - b|; None where the types have no numbers
    relative      the largest |a - b| / max(|a|, |b|)
    where         the element with the largest |a - b|, in row-major order; None where none differs
    nans          of both sides
    """

    unequal: int = 0
    unequal_bits: int = 0
    absolute: float | None = 0.0
    relative: float | None = 0.0
    where: int | None = None
    nans: tuple[int, int] = (0, 0)

    def and_then(self, later: Differences) -> Differences:
        """Of this run, and one that follows it."""
        is_larger = later.where is not None and (self.where is None or (later.absolute or 0) > (self.absolute or 0))
        return Differences(
            self.unequal + later.unequal, self.unequal_bits + later.unequal_bits,
            _larger(self.absolute, later.absolute), _larger(self.relative, later.relative),
            later.where if is_larger else self.where,
            (self.nans[0] + later.nans[0], self.nans[1] + later.nans[1]),
        )


def _larger(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def compare(
    a: NDArray[np.uint8], b: NDArray[np.uint8], kinds: tuple[DType, DType], tolerance: Tolerance, first: int = 0
) -> Differences:
    """The bytes of as many elements of both, the first of which is element `first` of its tensor."""
    sizes = kinds[0].item_bytes, kinds[1].item_bytes
    count = len(a) // sizes[0]
    assert len(b) // sizes[1] == count, "both sides have as many elements"
    found = Differences() if all(map(has_numbers, kinds)) else Differences(absolute=None, relative=None)
    for begin in range(0, count, _BLOCK_ELEMENTS):
        end = min(count, begin + _BLOCK_ELEMENTS)
        block = (a[begin * sizes[0] : end * sizes[0]], b[begin * sizes[1] : end * sizes[1]])
        found = found.and_then(_compare_block(block, kinds, tolerance, first + begin))
    return found


def has_numbers(kind: DType) -> bool:
    """Whether the values of a type are known here; of any other, bits alone are compared."""
    if kind.name in _NAN_ABOVE or kind.name in _EIGHT_BITS or kind.name in _OTHER:
        return True
    return kind.name.rstrip("0123456789") in ("int", "uint") and not kind.as_bytes


def _compare_block(
    block: tuple[NDArray[np.uint8], NDArray[np.uint8]], kinds: tuple[DType, DType], tolerance: Tolerance, first: int
) -> Differences:
    is_one_kind = kinds[0] is kinds[1]
    is_known = all(map(has_numbers, kinds))
    nans = (_nans(block[0], kinds[0]), _nans(block[1], kinds[1])) if is_known else (0, 0)
    unlike = _unlike_bits(block[0], block[1], kinds[0].item_bytes) if is_one_kind else None
    if unlike is not None and not len(unlike):
        return Differences(nans=nans) if is_known else Differences(absolute=None, relative=None)
    if not is_known:
        count = len(unlike) if unlike is not None else len(block[0]) // kinds[0].item_bytes
        return Differences(count, count, None, None, None)
    pick = slice(None) if unlike is None else unlike
    with np.errstate(all="ignore"):
        x, y = (numbers(part, kind)[pick] for part, kind in zip(block, kinds, strict=True))
        unequal, absolute, relative, position = _spread(x, y, tolerance)
    where = None if position is None else first + (position if unlike is None else int(unlike[position]))
    return Differences(unequal, unequal if unlike is None else len(unlike), absolute, relative, where, nans)


def _unlike_bits(a: NDArray[np.uint8], b: NDArray[np.uint8], item: int) -> NDArray[np.intp]:
    """The positions of the elements whose bytes differ."""
    word = min(item, 8)
    kind = np.dtype(f"u{word}")
    unlike = a.view(kind) != b.view(kind)
    return np.flatnonzero(unlike if item == word else unlike.reshape(-1, item // word).any(axis=1))


def _spread(x: Values, y: Values, tolerance: Tolerance) -> tuple[int, float, float, int | None]:
    """How many are unequal, the largest differences, and where the larger of these is."""
    is_same = (x == y) | (np.isnan(x) & np.isnan(y))
    distance = np.where(is_same, 0, np.abs(x - y))
    size = np.maximum(np.abs(x), np.abs(y))
    relative = np.where(is_same, 0, distance / np.where(size > 0, size, 1))
    is_finite = np.isfinite(x) & np.isfinite(y)
    is_near = is_finite & (distance <= tolerance.absolute + tolerance.relative * np.abs(y))
    unequal = len(x) - int(np.count_nonzero(is_same | is_near))
    if is_same.all():
        return unequal, 0.0, 0.0, None
    known = np.where(np.isnan(distance), -1, distance)  # a NaN on one side has no distance from a number
    where = int(np.argmax(known))
    return unequal, max(0.0, float(known[where])), float(np.nanmax(np.where(is_finite, relative, 0))), where


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
    """The values of elements, wide enough for exact differences: integers as long doubles (64 bits of mantissa)."""
    if kind.name in CASTABLE:
        with np.errstate(invalid="ignore"):  # NaNs that signal
            return to_wide(content.view(f"u{kind.item_bytes}"), kind).astype(np.float64)
    if kind.name in _EIGHT_BITS:
        return _eight_bit_values(kind.name)[content]
    if kind.name == "float8_e8m0fnu":
        return np.append(2.0 ** np.arange(-127, 128), np.nan)[content]
    if kind.name.startswith("complex"):
        return content.view(kind.name).astype(np.complex128)
    return content.view(kind.name).astype(np.longdouble)


def _eight_bit_values(name: str) -> NDArray[np.float64]:
    """What each of the 256 bytes means (OCP 8-bit floating point; `fnuz` is of Graphcore and AMD)."""
    exponent_bits, bias = _EIGHT_BITS[name]
    mantissa_bits = 7 - exponent_bits
    found = np.zeros(256)
    for byte in range(256):
        exponent, mantissa = byte % 128 >> mantissa_bits, byte % (1 << mantissa_bits)
        share = mantissa / (1 << mantissa_bits)
        value = math.ldexp(share, 1 - bias) if exponent == 0 else math.ldexp(1 + share, exponent - bias)
        found[byte] = -value if byte > 127 else value
    if name.endswith("fnuz"):
        found[128] = np.nan
    elif name == "float8_e4m3fn":
        found[[127, 255]] = np.nan
    else:
        found[[124, 252]] = np.inf, -np.inf
        found[[125, 126, 127, 253, 254, 255]] = np.nan
    return found
