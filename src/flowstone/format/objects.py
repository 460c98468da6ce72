"""Objects: all values of a state that are not tensors, as typed JSON. Never pickle, never code.

A node is one JSON value. Plain JSON stands for itself:

| Node                                | Value                                                              |
|-------------------------------------|--------------------------------------------------------------------|
| `null`, `true`, `false`             | None, True, False                                                  |
| number without `.` or exponent      | int, from -2^53 to 2^53                                            |
| number with `.` or exponent         | float, finite; shortest text that reads back the same, `-0.0` too  |
| string                              | str without lone surrogates                                        |
| array of nodes                      | list                                                               |
| object, no key begins with `$`      | dict whose keys are all such strings, in order                     |

Everything else is an object with exactly one key that begins with `$`, its tag:

| Node                                          | Value                                                    |
|-----------------------------------------------|----------------------------------------------------------|
| `{"$int": "-2a"}`                             | int beyond 2^53, lower-case hexadecimal                  |
| `{"$float": "7ff8000000000001"}`              | NaN or infinity: the 64 IEEE bits, big-endian, in hex    |
| `{"$complex": [float node, float node]}`      | complex: real, imaginary                                 |
| `{"$text": base64}`                           | str with lone surrogates, as UTF-8 that lets them pass   |
| `{"$bytes": base64}`, `{"$bytearray": ...}`   | bytes, bytearray                                         |
| `{"$tuple": [node, ...]}`                     | tuple                                                    |
| `{"$dict": [[node, node], ...]}`              | dict with any other keys, pairs in order                 |
| `{"$ordered": [[node, node], ...]}`           | collections.OrderedDict                                  |
| `{"$counter": [[node, node], ...]}`           | collections.Counter                                      |
| `{"$set": [...]}`, `{"$frozenset": [...]}`    | set, frozenset; written in the order of the nodes' text  |
| `{"$deque": [node, ...], "maxlen": n}`        | collections.deque; n is an int or null                   |
| `{"$range": [start, stop, step]}`             | range, three int nodes                                   |
| `{"$slice": [start, stop, step]}`             | slice, three nodes                                       |
| `{"$numpy": dtype, "hex": bytes}`             | numpy scalar: dtype name, its bytes little-endian in hex |
| `{"$numpy": "str", "text": node}`             | numpy.str_                                               |
| `{"$numpy": "bytes", "data": base64}`         | numpy.bytes_                                             |
| `{"$named": kind, "text": text}`              | a constant by name: `torch.dtype` `bfloat16`, ...        |
| `{"$tensor": name}`                           | a torch tensor, which lies under `name` in the index     |
| `{"$ndarray": name}`                          | a numpy array, the same                                  |
| `{"$bytes_at": name}`, `{"$bytearray_at": n}` | bytes, bytearray: too long for here; a uint8 tensor      |
| `{"$provided": kind, "parts": a, "objects": b}` | what a provider calls `kind` (text): a is an object of   |
|                                               | `$tensor` and `$ndarray`, b one of any nodes             |

No node lies deeper than `DEPTH_MAX` values. An unknown tag is a feature of a newer version; any
other departure from the tables is damage.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Literal, TypeAlias, cast

import msgspec
import numpy as np

from flowstone.errors import DamagedError, UnsupportedFormatError, UnsupportedStateError
from flowstone.format.bounds import KEYS, Path, brief, dotted, hashed
from flowstone.format.leaves import (
    INT_MAX,
    Node,
    checked,
    float_node,
    from_base64,
    int_node,
    pair,
    read_float,
    read_int,
    read_scalar,
    scalar_node,
    text_node,
    three,
    to_base64,
    valid_text,
)
from flowstone.format.merge_points import Groups, MergePoint

RefKind: TypeAlias = Literal["tensor", "ndarray", "bytes", "bytearray"]

DEPTH_MAX = 100  # nesting; a level takes up to 3 Python frames, of which there are 1000
_REF_TAGS: Mapping[str, RefKind] = {
    "$tensor": "tensor",
    "$ndarray": "ndarray",
    "$bytes_at": "bytes",
    "$bytearray_at": "bytearray",
}
_TAG_OF_REF = {kind: tag for tag, kind in _REF_TAGS.items()}


class TensorRef(msgspec.Struct, frozen=True, gc=False):
    """Stands for a value that is stored as the tensor `name` of the index; `kind` is the value's type.

    A Struct, since there may be one per tensor: a frozen dataclass takes three times as long to create.
    """

    name: str
    kind: RefKind


def tensor_refs(names: Iterable[str]) -> list[TensorRef]:
    """References to torch tensors, one for each name."""
    kind: RefKind = "tensor"
    return list(map(TensorRef, names, repeat(kind)))


class Named(msgspec.Struct, frozen=True):
    """A library's constant by its name; a reader can show it without that library."""

    kind: str  # "torch.dtype", "torch.device", "torch.Size", "numpy.dtype", ...
    text: str


class Provided(msgspec.Struct, frozen=True):
    """A provider's record of an object: `kind` is the provider's name for such objects. Nothing here creates one.

    parts    its tensors, by their names below the object's own name, as places in the index
    objects  its other values by name
    """

    kind: str
    parts: dict[str, TensorRef]
    objects: dict[str, object]


def unsupported(path: str, value: object, why: str = "cannot be stored", remedy: str = "") -> UnsupportedStateError:
    """The error for a value that has no node; names its path, its type and the remedy."""
    kind = type(value)
    remedy = remedy or (
        "convert it to plain values, give its class state_dict() and load_state_dict(), or leave it out of the state"
    )
    return UnsupportedStateError(f"'{path}' {why}", found=f"{kind.__module__}.{kind.__qualname__}", next=remedy)


def encode(value: object, path: str) -> Node:
    """The node of `value`, for a JSON writer that keeps the order of keys.

    path     dotted path of `value` in the state, for messages
    raises   UnsupportedStateError for a type that is not in the table (subclasses are not),
             for a value that contains itself, and below DEPTH_MAX

    Pure: neither keeps nor changes `value`.
    """
    return _Encoder().node(value, path)


def encode_text(value: object, path: str) -> msgspec.Raw:
    """The JSON text of a value's node, in UTF-8; raises as `encode` does."""
    return msgspec.Raw(msgspec.json.encode(_Encoder(in_text=True).node(value, path)))


def decode(node: object, path: str) -> object:
    """The value of a node from a JSON reader. `node` may be hostile.

    path     dotted path, for messages
    raises   UnsupportedFormatError for an unknown tag or constant, DamagedError for anything
             else that `encode` does not write
    """
    return _Decoder().value(node, path)


def decode_text(text: msgspec.Raw | bytes, path: str) -> object:
    """As `decode`, of a node's JSON text. Raises msgspec.DecodeError, too, for text that is not JSON."""
    with suppress(msgspec.DecodeError):  # a dict of nothing but references: no node for each of them
        found = _REFERENCES.decode(text)
        keys = "".join(found)
        if valid_text(keys) and not ("$" in keys and any(key[:1] == "$" for key in found)):
            references = cast("dict[str, object]", found)
            references.update(zip(references, tensor_refs([one.name for one in found.values()]), strict=True))
            return references
    return decode(msgspec.json.decode(text), path)


class _Encoder:
    """One walk over one value; tracks the depth, and the containers that enclose the current value.

    in_text  containers of references may be returned as finished JSON text, which only msgspec can write
    """

    def __init__(self, *, in_text: bool = False) -> None:
        self._open: set[int] = set()
        self._in_text = in_text

    def node(self, value: object, path: str) -> Node:
        kind = type(value)
        if value is None or kind is bool:
            return cast("Node", value)
        if kind in _LEAVES:
            return _LEAVES[kind](value)
        if kind in _CONTAINERS:
            return self._container(value, path)
        if isinstance(value, np.generic):
            node = scalar_node(value)
            if node is None:
                raise unsupported(path, value)
            return node
        raise unsupported(path, value)

    def _container(self, value: object, path: str) -> Node:
        if id(value) in self._open:
            raise unsupported(path, value, "contains itself", "break the cycle, or leave it out of the state")
        if len(self._open) >= DEPTH_MAX:
            raise unsupported(path, value, f"is nested more than {DEPTH_MAX} levels deep", "flatten it")
        if self._in_text and type(value) in _TEXTS:
            text = _references_text(value)
            if text is not None:
                return cast("Node", msgspec.Raw(text.encode()))
        self._open.add(id(value))
        try:
            return _CONTAINERS[type(value)](self, value, path)
        finally:
            self._open.discard(id(value))

    def _nodes(self, values: Iterable[object], path: str) -> list[Node]:
        return [self.node(item, f"{path}.{i}") for i, item in enumerate(values)]

    def _pairs(self, value: dict[object, object], path: str) -> list[Node]:
        return [[self.node(k, f"{path} key"), self.node(v, f"{path}.{key_text(k)}")] for k, v in value.items()]

    def _dict(self, value: dict[object, object], path: str) -> Node:
        if all(type(key) is str and key[:1] != "$" and valid_text(key) for key in value):
            return {cast("str", key): self.node(item, f"{path}.{key}") for key, item in value.items()}
        return {"$dict": self._pairs(value, path)}

    def _set(self, value: Iterable[object], path: str) -> list[Node]:
        # The order of a set differs between processes; the order of its nodes' text does not.
        return sorted((self.node(item, f"{path} item") for item in value), key=json.dumps)

    def _provided(self, value: Provided, path: str) -> Node:
        parts, values = self.node(value.parts, path), self.node(value.objects, path)
        return {"$provided": value.kind, "parts": parts, "objects": values}

    def _deque(self, value: deque[object], path: str) -> Node:
        return {"$deque": self._nodes(value, path), "maxlen": value.maxlen}


def key_text(key: object) -> str:
    """A dict key as a component of a dotted path: text as it is, anything else as its repr."""
    if isinstance(key, str):
        return key
    try:
        return repr(key)
    except ValueError:  # Python refuses to show ints of 4,300 digits
        return f"{key:x}" if type(key) is int else brief(key)


_LEAVES: Mapping[type, Callable[..., Node]] = {
    int: int_node,
    float: float_node,
    str: text_node,
    complex: lambda value: {"$complex": [float_node(value.real), float_node(value.imag)]},
    bytes: lambda value: {"$bytes": to_base64(value)},
    bytearray: lambda value: {"$bytearray": to_base64(value)},
    range: lambda value: {"$range": [int_node(value.start), int_node(value.stop), int_node(value.step)]},
    TensorRef: lambda value: {_TAG_OF_REF[value.kind]: value.name},
    Named: lambda value: {"$named": value.kind, "text": value.text},
}
_CONTAINERS: Mapping[type, Callable[..., Node]] = {
    list: _Encoder._nodes,
    Groups: _Encoder._nodes,
    dict: _Encoder._dict,
    MergePoint: _Encoder._dict,
    tuple: lambda encoder, value, path: {"$tuple": encoder._nodes(value, path)},
    OrderedDict: lambda encoder, value, path: {"$ordered": encoder._pairs(value, path)},
    Counter: lambda encoder, value, path: {"$counter": encoder._pairs(value, path)},
    set: lambda encoder, value, path: {"$set": encoder._set(value, path)},
    frozenset: lambda encoder, value, path: {"$frozenset": encoder._set(value, path)},
    deque: _Encoder._deque,
    Provided: _Encoder._provided,
    slice: lambda encoder, part, path: {"$slice": encoder._nodes((part.start, part.stop, part.step), path)},
}


_TEXTS: Mapping[type, tuple[str, str]] = {
    dict: ("{", "}"),
    MergePoint: ("{", "}"),
    OrderedDict: ('{"$ordered":[', "]}"),
    list: ("[", "]"),
    tuple: ('{"$tuple":[', "]}"),
}
"""For containers that may hold tens of thousands of tensors: how their JSON begins and ends."""


def _references_text(value: object) -> str | None:
    """The JSON of a container that holds only references; None if it holds others, or some text needs escapes."""
    items = list(value.values()) if isinstance(value, dict) else cast("list[object]", value)
    if len(items) < 2 or set(map(type, items)) != {TensorRef}:
        return None
    references = cast("list[TensorRef]", items)
    keys = list(value) if isinstance(value, dict) else []
    names = [one.name for one in references]
    if {one.kind for one in references} != {"tensor"} or set(map(type, keys)) - {str} or not _plain([*keys, *names]):
        return None
    if type(value) in (dict, MergePoint):
        parts = [f'"{key}":{{"$tensor":"{name}"}}' for key, name in zip(keys, names, strict=True)]
    elif keys:
        parts = [f'["{key}",{{"$tensor":"{name}"}}]' for key, name in zip(keys, names, strict=True)]
    else:
        parts = [f'{{"$tensor":"{name}"}}' for name in names]
    begin, end = _TEXTS[type(value)]
    return begin + ",".join(parts) + end


def _plain(texts: list[str]) -> bool:
    """Whether JSON writes all texts unchanged, and none looks like a tag."""
    together = "".join(texts)
    return together.isascii() and together.isprintable() and not any(mark in together for mark in '"\\$')


def _damaged(path: Path, expected: str, found: object) -> DamagedError:
    text = brief(found)
    return DamagedError(
        f"the object '{dotted(path)}' does not match its type",
        expected=expected,
        found=text if len(text) <= 80 else text[:77] + "...",
        next="run `flowstone verify`; load another checkpoint",
    )


class _Decoder:
    """One walk over one node."""

    def __init__(self) -> None:
        self._depth = 0

    def value(self, node: object, path: Path) -> object:
        if node is None or type(node) is bool:
            return node
        if type(node) is int:
            if not -INT_MAX <= node <= INT_MAX:
                raise _damaged(path, "an int within 2^53", node)
            return node
        if type(node) is float:
            if not math.isfinite(node):
                raise _damaged(path, "a finite number", node)
            return node
        if type(node) is str:
            if not valid_text(node):
                raise _damaged(path, "text without lone surrogates", node)
            return node
        if self._depth > DEPTH_MAX:
            raise _damaged(path, f"at most {DEPTH_MAX} levels", "more")
        self._depth += 1
        try:
            if type(node) is list:
                return self.values(node, path)
            if type(node) is dict:
                return self._object(node, path)
        finally:
            self._depth -= 1
        raise _damaged(path, "a JSON value", type(node))

    def _object(self, node: dict[object, object], path: Path) -> object:
        entries = cast("dict[str, object]", node)
        if set(map(type, node)) - {str} or not valid_text("".join(entries)):
            raise _damaged(path, "keys that are text", list(node))
        tags = [key for key in entries if key[:1] == "$"]
        if not tags:
            references = _references(entries.values())
            if references is not None:
                return dict(zip(entries, references, strict=True))
            return {key: self.value(item, (path, key)) for key, item in entries.items()}
        if len(tags) > 1:
            raise _damaged(path, "one tag", tags)
        tag = tags[0]
        if tag not in _LEAF_TAGS and tag not in _NODE_TAGS:
            raise UnsupportedFormatError(
                f"the object '{dotted(path)}' is of a type that this version cannot read",
                found=brief(tag),
                next="load it with the version of flowstone that saved it, or a later one",
            )
        try:
            if tag in _LEAF_TAGS and len(node) == 1:
                return _LEAF_TAGS[tag](node[tag])
            return self._tagged(tag, entries, path)
        except (ValueError, TypeError, OverflowError) as error:
            raise _damaged(path, f"a valid {tag} ({error!s:.200})", node[tag]) from error

    def _tagged(self, tag: str, node: dict[str, object], path: Path) -> object:
        """The value of a tagged node that has further keys, or whose parts are nodes."""
        part = node[tag]
        match tag, sorted(set(node) - {tag}):
            case "$tuple", []:
                return tuple(self.values(part, path))
            case "$dict", []:
                return self.pairs(part, path)
            case "$ordered", []:
                return OrderedDict(self.pairs(part, path))
            case "$counter", []:
                return self._counter(part, path)
            case "$set", []:
                return self._members(part, path)
            case "$frozenset", []:
                return frozenset(self._members(part, path))
            case "$deque", ["maxlen"]:
                return self._deque(part, node["maxlen"], path)
            case "$range", []:
                return range(*(checked(one, int) for one in three(self.values(part, path))))
            case "$slice", []:
                return slice(*three(self.values(part, path)))
            case "$complex", []:
                real, imag = (checked(one, float) for one in self.values(part, path))
                return complex(real, imag)
            case "$named", ["text"]:
                return Named(checked(part, str), checked(node["text"], str))
            case "$numpy", ["hex"]:
                return read_scalar(checked(part, str), node["hex"])
            case "$numpy", ["text"] if part == "str":
                return np.str_(checked(self.value(node["text"], path), str))
            case "$numpy", ["data"] if part == "bytes":
                return np.bytes_(from_base64(node["data"]))
            case "$provided", ["objects", "parts"]:
                return self._provided(part, node["parts"], node["objects"], path)
        raise ValueError(f"with the keys {brief(sorted(node))}")

    def values(self, node: object, path: Path) -> list[object]:
        references = _references(checked(node, list))
        if references is not None:
            return cast("list[object]", references)
        return [self.value(item, (path, i)) for i, item in enumerate(checked(node, list))]

    def pairs(self, node: object, path: Path) -> dict[object, object]:
        pairs = [pair(one) for one in checked(node, list)]
        keys, nodes = [key for key, _ in pairs], [value for _, value in pairs]
        names = hashed(self.values(keys, (path, KEYS)))
        values: Iterable[object] | None = _references(nodes)
        if values is None:
            values = [self.value(value, (path, name)) for name, value in zip(names, nodes, strict=True)]
        found = dict(zip(names, values, strict=True))
        if len(found) != len(pairs):
            raise ValueError("a key twice")
        return found

    def _members(self, node: object, path: Path) -> set[object]:
        found = set(hashed(self.values(node, path)))
        if len(found) != len(cast("list[object]", node)):
            raise ValueError("a member twice")
        return found

    def _counter(self, node: object, path: Path) -> Counter[object]:
        found: Counter[object] = Counter()
        for key, count in self.pairs(node, path).items():
            found[key] = cast("int", count)  # any value: a Counter does not check it either
        return found

    def _provided(self, kind: object, parts: object, values: object, path: Path) -> Provided:
        found, others = (checked(self.value(one, path), dict) for one in (parts, values))
        if set(map(type, (*found, *others))) - {str}:
            raise TypeError("names that are text")
        for part in found.values():
            if checked(part, TensorRef).kind not in ("tensor", "ndarray"):
                raise ValueError("tensors or arrays expected")
        return Provided(checked(kind, str), found, others)

    def _deque(self, node: object, maxlen: object, path: Path) -> deque[object]:
        items = self.values(node, path)
        if maxlen is not None and len(items) > checked(maxlen, int):
            raise ValueError("more items than maxlen")
        return deque(items, cast("int | None", maxlen))


def _references(nodes: Collection[object]) -> list[TensorRef] | None:
    """The values of nodes that are all references to torch tensors; else None. A fast path for states with many."""
    if set(map(type, nodes)) != {dict}:
        return None
    dicts = cast("Collection[dict[str, object]]", nodes)
    if set(map(len, dicts)) != {1}:
        return None
    try:
        names = list(map(itemgetter("$tensor"), dicts))
    except KeyError:
        return None
    return tensor_refs(cast("list[str]", names)) if set(map(type, names)) == {str} else None


class _Reference(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, rename={"name": "$tensor"}):
    name: str


_REFERENCES = msgspec.json.Decoder(dict[str, _Reference])


def _ref(kind: RefKind, node: object) -> TensorRef:
    return TensorRef(checked(node, str), kind)


_LEAF_TAGS: Mapping[str, Callable[[object], object]] = {
    "$int": read_int,
    "$float": read_float,
    "$text": lambda node: from_base64(node).decode("utf-8", "surrogatepass"),
    "$bytes": from_base64,
    "$bytearray": lambda node: bytearray(from_base64(node)),
    **{tag: partial(_ref, kind) for tag, kind in _REF_TAGS.items()},
}
_NODE_TAGS = frozenset({
    "$complex", "$counter", "$deque", "$dict", "$frozenset", "$named",
    "$numpy", "$ordered", "$provided", "$range", "$set", "$slice", "$tuple",
})
