"""The values in torch's pickles: tensors as views of storages, and constants of torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from flowstone.config import NDIM_MAX
from flowstone.convert.sources.restricted_unpickler import Global, KnownFunctions, Opaque, hashables, items_of, pairs_of
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format.objects import NamedConstant
from flowstone.table.dtype import DTYPES, DType

STORAGE_DTYPES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_UNTYPED = ("torch.UntypedStorage", "torch.storage.UntypedStorage")
_NUMBER_MAX = 1 << 60
_TEXT_CHARS_MAX = 100  # longest name of a device or layout


class StorageRef(msgspec.Struct, frozen=True):
    """A reference to a storage, by its key in the file. `dtype`: None if the storage has no type. `bytes`: its length.
    """

    key: str
    dtype: DType | None
    bytes: int


class TensorView(msgspec.Struct, frozen=True):
    """A tensor as a view of a storage. `offset` and `strides` are counted in elements."""

    storage: StorageRef
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def storage_of(identity: object) -> StorageRef:
    """The storage that torch's persistent id ("storage", type, key, location, elements) refers to. Raises ValueError.
    """
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        raise ValueError("a persistent id does not refer to a storage")
    kind, key, elements = identity[1], identity[2], identity[4]
    if not isinstance(kind, Global) or not isinstance(key, str) or not isinstance(elements, int):
        raise ValueError("the description of a storage is not valid")
    if not 0 <= elements < _NUMBER_MAX:
        raise ValueError("a storage has a negative or too large number of elements")
    if kind.name in _UNTYPED:
        return StorageRef(key, None, elements)
    name = STORAGE_DTYPES.get(kind.name.removeprefix("torch."))
    if name is None:
        raise UnsupportedFormatError(
            f"a storage has the unknown type {kind.name:.80}",
            next="load the file with torch, and save it with fs.Checkpointer",
        )
    return StorageRef(key, DTYPES[name], elements * DTYPES[name].item_bytes)


def _tensor_v2(storage: object, offset: object, shape: object, strides: object, *rest: object) -> TensorView:
    if len(rest) > 2 and isinstance(rest[2], dict) and any(rest[2].values()):
        raise UnsupportedFormatError(
            "a tensor is a lazy conjugate or negation (is_conj() or is_neg() is true)",
            found=", ".join(key for key in rest[2] if isinstance(key, str)),
            next="save tensor.resolve_conj().resolve_neg()",
        )
    return _tensor(storage, offset, shape, strides, None)


def _tensor_v3(storage: object, offset: object, shape: object, strides: object, *rest: object) -> TensorView:
    dtype = rest[2] if len(rest) > 2 else None
    if not isinstance(dtype, Global) or dtype.name.removeprefix("torch.") not in DTYPES:
        name = dtype.name if isinstance(dtype, Global) else type(dtype).__name__
        raise UnsupportedFormatError(
            f"a tensor has the unknown dtype {name:.80}",
            next="load the file with torch, and save it with fs.Checkpointer",
        )
    return _tensor(storage, offset, shape, strides, DTYPES[dtype.name.removeprefix("torch.")])


def _tensor(storage: object, offset: object, shape: object, strides: object, dtype: DType | None) -> TensorView:
    begin, sides, steps = *dimension_lengths((offset,)), dimension_lengths(shape), dimension_lengths(strides)
    if not isinstance(storage, StorageRef) or len(sides) != len(steps):
        raise ValueError("a tensor has no storage, or its shape and strides differ in length")
    kind = dtype or storage.dtype
    if kind is None:
        raise ValueError("a tensor has no dtype")
    return TensorView(storage, kind, begin, sides, steps)


def dimension_lengths(values: object) -> tuple[int, ...]:
    """Return the values as a tuple of numbers of elements, one for each dimension. Raises ValueError if they are
    invalid.
    """
    numbers = items_of(values)
    if len(numbers) > NDIM_MAX:
        raise ValueError(f"a tensor has {len(numbers)} dimensions, more than {NDIM_MAX}")
    if not all(isinstance(n, int) and 0 <= n < _NUMBER_MAX for n in numbers):
        raise ValueError("a tensor has a negative or too large length, stride or offset")
    return tuple(numbers)


def size_of(value: object) -> tuple[int, ...]:
    """The numbers in a torch.Size, tuple or list, as a tuple. Raises ValueError."""
    if isinstance(value, NamedConstant) and value.kind == "torch.Size":
        return tuple(int(n) for n in value.text.split(",") if n)
    return dimension_lengths(value)


def _parameter(tensor: object, *_: object) -> object:
    return tensor


def _from_type(function: object, kind: object, arguments: object, *_: object) -> object:
    """Rebuild a tensor with attributes, or of a subclass. Returns the plain tensor if its type is one of torch's, else
    an Opaque.
    """
    plain = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter")
    if isinstance(function, Global) and function.name in plain and isinstance(kind, Global):
        if kind.name in ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"):
            return KNOWN[function.name](*items_of(arguments))
        return Opaque(kind.name)
    return Opaque(kind.name if isinstance(kind, Global) else "a tensor subclass")


def _ordered_dict(items: object = ()) -> OrderedDict[object, object]:
    return OrderedDict(pairs_of(items))


def _counter(items: object = ()) -> Counter[Any]:
    return Counter(dict(pairs_of(items)))


def _dict(items: object = ()) -> dict[object, object]:
    return dict(pairs_of(items))


def _container_maker(kind: type) -> Callable[..., object]:
    """A function that makes a container of a builtin type, empty or from the values that it is given."""
    is_hashed = kind in (set, frozenset)
    return lambda values=(): kind(hashables(items_of(values)) if is_hashed else items_of(values))


def _text_bytes(text: object = "", encoding: object = "latin-1") -> bytes:
    """The bytes that pickle protocol 2 stores as latin-1 text."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes have an unknown encoding")
    return text.encode("latin1")


def _bytearray(content: object = b"", *encoding: object) -> bytearray:
    """A bytearray made from bytes or from latin-1 text. A number is refused, as Python would allocate that many bytes.
    """
    return bytearray(content if isinstance(content, bytes) else _text_bytes(content, *encoding))


def _slice(*parts: object) -> slice:
    if not all(part is None or isinstance(part, int | float | str) for part in parts):
        raise ValueError("the bounds of a slice are not numbers")
    return slice(*parts)


def _device(*parts: object) -> NamedConstant:
    text = ":".join(map(str, parts)) if all(isinstance(part, int | str) for part in parts) else ""
    if not 0 < len(text) <= _TEXT_CHARS_MAX:
        raise ValueError("the name of a device is not valid")
    return NamedConstant("torch.device", text)


def _layout(name: object) -> Global:
    if not isinstance(name, str) or len(name) > _TEXT_CHARS_MAX:
        raise ValueError("the name of a layout is not valid")
    return Global(name)


KNOWN: KnownFunctions = {
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": lambda sides=(): NamedConstant("torch.Size", ",".join(map(str, dimension_lengths(sides)))),
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "collections.OrderedDict": _ordered_dict,
    "collections.Counter": _counter,
    "_codecs.encode": _text_bytes,
    **{f"{module}.{kind.__name__}": _container_maker(kind) for module in ("builtins", "__builtin__")
       for kind in (set, frozenset, list, tuple)},
    **{f"{module}.{name}": call for module in ("builtins", "__builtin__") for name, call in (
        ("bytearray", _bytearray), ("bytes", lambda: b""), ("complex", complex), ("dict", _dict), ("range", range),
        ("xrange", range),  # the name of range in pickle protocol 2
        ("slice", _slice),
    )},
}
"""All functions that a pickle of torch may call."""


def view_bytes(view: TensorView) -> tuple[int, int]:
    """Where the elements of a view are in its storage: begin and end, in bytes. Raises DamagedError."""
    item = view.dtype.item_bytes
    reach = 0 if 0 in view.shape else sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + 1
    begin, end = view.offset * item, (view.offset + reach) * item
    if end > view.storage.bytes:
        raise DamagedError(
            f"a tensor of shape {view.shape} reaches beyond its storage", found=f"{end} bytes",
            expected=f"at most {view.storage.bytes} bytes", next="do not use this file",
        )
    return begin, end
