"""What torch's own pickles describe: tensors as places in storages, and the constants of torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from flowstone.convert.sources.restricted_unpickler import Global, Known, Opaque
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format.objects import Named
from flowstone.table.dtype import DTYPES, DType

STORAGE_DTYPES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_UNTYPED = ("torch.UntypedStorage", "torch.storage.UntypedStorage")


class StorageRef(msgspec.Struct, frozen=True):
    """A storage by its key in the file; `dtype` is None where its bytes have no type."""

    key: str
    dtype: DType | None
    bytes: int


class TensorView(msgspec.Struct, frozen=True):
    """A tensor as its pickle has it: a view of a storage, all numbers in elements."""

    storage: StorageRef
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def storage_of(identity: object) -> StorageRef:
    """What torch's persistent id says: ("storage", type, key, location, elements). Raises ValueError."""
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        raise ValueError("a persistent id that is no storage")
    kind, key, elements = identity[1], identity[2], identity[4]
    if not isinstance(kind, Global) or not isinstance(key, str) or not isinstance(elements, int) or elements < 0:
        raise ValueError("a storage that is not described as torch does it")
    if kind.name in _UNTYPED:
        return StorageRef(key, None, elements)
    name = STORAGE_DTYPES.get(kind.name.removeprefix("torch."))
    if name is None:
        raise UnsupportedFormatError(f"a storage of the unknown type {kind.name:.80}", next="convert it with torch")
    return StorageRef(key, DTYPES[name], elements * DTYPES[name].item_bytes)


def _tensor_v2(storage: object, offset: int, shape: Sequence[int], strides: Sequence[int], *rest: object) -> TensorView:
    if len(rest) > 2 and isinstance(rest[2], dict) and any(rest[2].values()):
        raise UnsupportedFormatError(
            "a tensor is a lazy conjugate or negation", found=", ".join(map(str, rest[2])),
            next="save tensor.resolve_conj().resolve_neg()",
        )
    return _tensor(storage, offset, shape, strides, None)


def _tensor_v3(
    storage: object, offset: int, shape: Sequence[int], strides: Sequence[int], *rest: object
) -> TensorView:
    dtype = rest[2] if len(rest) > 2 else None
    if not isinstance(dtype, Global) or dtype.name.removeprefix("torch.") not in DTYPES:
        name = dtype.name if isinstance(dtype, Global) else dtype
        raise UnsupportedFormatError(f"a tensor of the unknown type {name!s:.80}", next="convert it with torch")
    return _tensor(storage, offset, shape, strides, DTYPES[dtype.name.removeprefix("torch.")])


def _tensor(
    storage: object, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: DType | None
) -> TensorView:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, StorageRef) or len(shape) != len(strides):
        raise ValueError("a tensor without a storage, or of two ranks")
    if not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError("a tensor with a negative or too large number")
    kind = dtype or storage.dtype
    if kind is None:
        raise ValueError("a tensor without a type")
    return TensorView(storage, kind, offset, tuple(shape), tuple(strides))


def _parameter(tensor: object, *_: object) -> object:
    return tensor


def _from_type(function: object, kind: object, arguments: tuple[object, ...], *_: object) -> object:
    """A tensor of a subclass, or with attributes: the tensor alone, where it is one of torch's own."""
    plain = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter")
    if isinstance(function, Global) and function.name in plain and isinstance(kind, Global):
        if kind.name in ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"):
            return KNOWN[function.name](*arguments)
        return Opaque(kind.name)
    return Opaque(kind.name if isinstance(kind, Global) else "a tensor subclass")


def _ordered(items: Sequence[tuple[object, object]] = ()) -> OrderedDict[object, object]:
    return OrderedDict(items)


def _counted(items: Mapping[Any, int] | None = None) -> Counter[Any]:
    return Counter(items or {})


def _made(kind: type) -> Callable[..., object]:
    """A container of a builtin type, of nothing or of values."""
    return lambda values=(): kind(values)


def _encoded(text: str, encoding: str) -> bytes:
    """How protocol 2 has bytes: as text, and latin-1."""
    if encoding != "latin1":
        raise ValueError("bytes in an unknown encoding")
    return text.encode("latin1")


KNOWN: Known = {
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": lambda sides=(): Named("torch.Size", ",".join(map(str, sides))),
    "torch.device": lambda *parts: Named("torch.device", ":".join(map(str, parts))),
    "torch.serialization._get_layout": lambda name: Global(name),
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counted,
    "_codecs.encode": _encoded,
    **{f"{module}.{kind.__name__}": _made(kind) for module in ("builtins", "__builtin__")
       for kind in (set, frozenset, bytearray, list, dict, tuple)},
    **{f"{module}.complex": complex for module in ("builtins", "__builtin__")},
    **{f"{module}.{kind.__name__}": kind for module in ("builtins", "__builtin__") for kind in (range, slice)},
}
"""All that a pickle of torch may call."""


def view_bytes(view: TensorView) -> tuple[int, int]:
    """Where a view's elements begin in its storage, and where they end, in bytes. Raises DamagedError."""
    item = view.dtype.item_bytes
    reach = 0 if 0 in view.shape else sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + 1
    begin, end = view.offset * item, (view.offset + reach) * item
    if end > view.storage.bytes:
        raise DamagedError(
            f"a tensor of shape {view.shape} reaches beyond its storage", found=f"{end} bytes",
            expected=f"at most {view.storage.bytes} bytes", next="do not use this file",
        )
    return begin, end
