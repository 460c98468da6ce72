"""Element types: their names, and how safetensors stores them."""

from __future__ import annotations

import msgspec


class DType(msgspec.Struct, frozen=True):
    """An element type. `stored`: its name in safetensors; "U8" if safetensors lacks the type, so that it is stored as
    bytes.
    """

    name: str
    item_bytes: int
    stored: str

    @property
    def as_bytes(self) -> bool:
        """Whether segments store the type as U8 with one more dimension, because safetensors lacks it."""
        return self.stored == "U8" and self.name != "uint8"

    @property
    def number_bytes(self) -> int:
        """Length of one number in bytes; a complex element consists of two numbers."""
        return self.item_bytes // 2 if self.name.startswith("complex") else self.item_bytes


def _dtype_table() -> dict[str, DType]:
    native = {
        "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
        "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
        "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
        "BOOL": ("bool", 1), "C64": ("complex64", 8),
        "F8_E4M3": ("float8_e4m3fn", 1), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
        "F8_E5M2": ("float8_e5m2", 1), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    }
    # Types that safetensors (or its torch reader, version 0.8) lacks are stored as bytes. Sub-byte integers are stored
    # as torch stores them in memory, packed or one per byte.
    foreign = {"complex32": 4, "complex128": 16, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1, "bits16": 2, "bits8": 1,
               "bits1x8": 1, "bits2x4": 1, "bits4x2": 1}
    foreign |= {f"{sign}{bits}": 1 for sign in ("int", "uint") for bits in range(1, 8)}
    table = {name: DType(name, item_bytes, stored) for stored, (name, item_bytes) in native.items()}
    return table | {name: DType(name, item_bytes, "U8") for name, item_bytes in foreign.items()}


DTYPES: dict[str, DType] = _dtype_table()
"""Every dtype that a piece can have, by torch's name; numpy's names are a subset."""
