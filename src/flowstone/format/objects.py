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

Each other value is a JSON object with exactly one key that begins with `$`, the node's tag:

| Node                                          | Value                                                    |
|-----------------------------------------------|----------------------------------------------------------|
| `{"$int": "-2a"}`                             | int beyond 2^53, lower-case hexadecimal                  |
| `{"$float": "7ff8000000000001"}`              | NaN or infinity: the 64 IEEE bits, big-endian, in hex    |
| `{"$complex": [float node, float node]}`      | complex: real, imaginary                                 |
| `{"$text": base64}`                           | str with lone surrogates, UTF-8 (Python: surrogatepass)  |
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
| `{"$tensor": name}`                           | a torch tensor, stored as `name` in the index            |
| `{"$ndarray": name}`                          | a numpy array, stored as `name` in the index             |
| `{"$bytes_at": name}`, `{"$bytearray_at": n}` | long bytes, bytearray, stored as a uint8 tensor          |
| `{"$provided": kind, "parts": a, "objects": b}` | a provider's object; `kind` is text; a maps names to    |
|                                               | `$tensor` and `$ndarray` nodes, b maps names to any nodes |

No node is nested deeper than `DEPTH_MAX` values. A node with an unknown tag comes from a newer version of Flowstone.
Any other deviation from these two tables means that the file is damaged.
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
from flowstone.format.bounds import KEYS, Path, checked_keys, dotted_path, short_repr
from flowstone.format.leaves import (
    INT_MAX,
    Node,
    expect_pair,
    expect_three,
    expect_type,
    float_node,
    from_base64,
    int_node,
    read_float,
    read_int,
    read_scalar,
    scalar_node,
    text_node,
    to_base64,
    valid_text,
)
from flowstone.format.merge_points import Groups, MergePoint

RefKind: TypeAlias = Literal["tensor", "ndarray", "bytes", "bytearray"]

DEPTH_MAX = 100  # limit of nesting; a level takes up to 3 Python frames, and Python allows 1000
_REF_TAGS: Mapping[str, RefKind] = {
    "$tensor": "tensor",
    "$ndarray": "ndarray",
    "$bytes_at": "bytes",
    "$bytearray_at": "bytearray",
}
_TAG_OF_REF = {kind: tag for tag, kind in _REF_TAGS.items()}


class TensorRef(msgspec.Struct, frozen=True, gc=False):
    """Stands for a value that is stored as the tensor `name` of the index; `kind` is the value's type. It is a
    msgspec.Struct, since there may be one for each tensor, and a frozen dataclass takes three times as long to create.
    """

    name: str
    kind: RefKind


def tensor_refs(names: Iterable[str]) -> list[TensorRef]:
    """References to torch tensors, one for each name."""
    kind: RefKind = "tensor"
    return list(map(TensorRef, names, repeat(kind)))


class NamedConstant(msgspec.Struct, frozen=True):
    """A constant of a library (such as torch.bfloat16), by its name. A reader can show it without that library."""

    kind: str  # "torch.dtype", "torch.device", "torch.Size", "numpy.dtype", ...
    text: str


class ProviderRecord(msgspec.Struct, frozen=True):
    """The state of an object that a provider stores. `kind` is the provider's name for this type of object.

    parts    the object's tensors: the end of a tensor's name, after the object's own name -> reference into the index
    objects  the object's other values: name -> value
    """

    kind: str
    parts: dict[str, TensorRef]
    objects: dict[str, object]


def unsupported_error(
    path: str, value: object, why: str = "cannot be stored", remedy: str = ""
) -> UnsupportedStateError:
    """The error for a value that cannot be encoded. It names the value's path and type, the reason `why`, and what to
    do (`remedy`).
    """
    kind = type(value)
    remedy = remedy or (
        "convert it to plain values, give its class state_dict() and load_state_dict(), or leave it out of the state"
    )
    return UnsupportedStateError(f"'{path}' {why}", found=f"{kind.__module__}.{kind.__qualname__}", next=remedy)


def encode(value: object, path: str) -> Node:
    """Returns the node of `value`: the JSON value that represents it, as this module's docstring says. The JSON writer
    must keep the order of keys.

    path     dotted path of `value` in the state, for messages
    raises   UnsupportedStateError  for types that the tables in that docstring lack (even if they are subclasses of
                                    types in the tables), for cycles, and for nesting deeper than DEPTH_MAX

    `value` is not changed, and no reference to it is kept.
    """
    return _Encoder().node(value, path)


def encode_text(value: object, path: str) -> msgspec.Raw:
    """The JSON text of a value's node, in UTF-8. Raises the errors of `encode`."""
    return msgspec.Raw(msgspec.json.encode(_Encoder(in_text=True).node(value, path)))


def decode(node: object, path: str) -> object:
    """Returns the value that a node represents. `node` comes from a JSON reader, and may be hostile.

    path     dotted path of the value, for messages
    raises   UnsupportedFormatError for an unknown tag or constant, DamagedError for any other deviation from the tables
             in this module's docstring
    """
    return _Decoder().value(node, path)


def decode_text(text: msgspec.Raw | bytes, path: str) -> object:
    """The value of a node that is given as JSON text. Raises the errors of `decode`, and msgspec.DecodeError for text
    that is not JSON.
    """
    with suppress(msgspec.DecodeError):  # a fast path for a dict that contains only references: it creates no nodes
        nodes = _REFERENCES.decode(text)
        keys = "".join(nodes)
        if valid_text(keys) and not ("$" in keys and any(key[:1] == "$" for key in nodes)):
            references = cast("dict[str, object]", nodes)
            references.update(zip(references, tensor_refs([node.name for node in nodes.values()]), strict=True))
            return references
    return decode(msgspec.json.decode(text), path)


class _Encoder:
    """Encodes one value. Keeps track of the depth, and of the containers that enclose the current value.

    in_text  whether a container of references may be returned as finished JSON text (msgspec.Raw), which only msgspec's
             encoder accepts
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
                raise unsupported_error(path, value)
            return node
        raise unsupported_error(path, value)

    def _container(self, value: object, path: str) -> Node:
        if id(value) in self._open:
            raise unsupported_error(
                path, value, "contains itself", "remove the reference to itself, or leave it out of the state"
            )
        if len(self._open) >= DEPTH_MAX:
            raise unsupported_error(
                path, value, f"is nested more than {DEPTH_MAX} levels deep", "use fewer levels of dicts and lists"
            )
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
        # The order of a set's elements differs between processes. The order of the texts of their nodes does not.
        return sorted((self.node(item, f"{path} item") for item in value), key=json.dumps)

    def _provided(self, value: ProviderRecord, path: str) -> Node:
        parts, values = self.node(value.parts, path), self.node(value.objects, path)
        return {"$provided": value.kind, "parts": parts, "objects": values}

    def _deque(self, value: deque[object], path: str) -> Node:
        return {"$deque": self._nodes(value, path), "maxlen": value.maxlen}


def key_text(key: object) -> str:
    """A dict key as a component of a dotted path: a str as it is, anything else as its repr."""
    if isinstance(key, str):
        return key
    try:
        return repr(key)
    except ValueError:  # Python refuses to print ints of more than 4,300 digits
        return f"{key:x}" if type(key) is int else short_repr(key)


_LEAVES: Mapping[type, Callable[..., Node]] = {
    int: int_node,
    float: float_node,
    str: text_node,
    complex: lambda value: {"$complex": [float_node(value.real), float_node(value.imag)]},
    bytes: lambda value: {"$bytes": to_base64(value)},
    bytearray: lambda value: {"$bytearray": to_base64(value)},
    range: lambda value: {"$range": [int_node(value.start), int_node(value.stop), int_node(value.step)]},
    TensorRef: lambda value: {_TAG_OF_REF[value.kind]: value.name},
    NamedConstant: lambda value: {"$named": value.kind, "text": value.text},
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
    ProviderRecord: _Encoder._provided,
    slice: lambda encoder, part, path: {"$slice": encoder._nodes((part.start, part.stop, part.step), path)},
}


_TEXTS: Mapping[type, tuple[str, str]] = {
    dict: ("{", "}"),
    MergePoint: ("{", "}"),
    OrderedDict: ('{"$ordered":[', "]}"),
    list: ("[", "]"),
    tuple: ('{"$tuple":[', "]}"),
}
"""How the JSON of a container begins and ends, for containers that may hold tens of thousands of tensors."""


def _references_text(value: object) -> str | None:
    """The JSON of a container that has only references to tensors. None if it has other values, or if a text needs JSON
    escapes.
    """
    items = list(value.values()) if isinstance(value, dict) else cast("list[object]", value)
    if len(items) < 2 or set(map(type, items)) != {TensorRef}:
        return None
    references = cast("list[TensorRef]", items)
    keys = list(value) if isinstance(value, dict) else []
    names = [reference.name for reference in references]
    kinds = {reference.kind for reference in references}
    if kinds != {"tensor"} or set(map(type, keys)) - {str} or not _plain([*keys, *names]):
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
    """Whether JSON writes all of these texts unchanged, and none begins like a tag."""
    together = "".join(texts)
    return together.isascii() and together.isprintable() and not any(mark in together for mark in '"\\$')


def _damaged(path: Path, expected: str, actual: object) -> DamagedError:
    text = short_repr(actual)
    return DamagedError(
        f"the stored object '{dotted_path(path)}' is invalid",
        expected=expected,
        found=text if len(text) <= 80 else text[:77] + "...",
        next="run `flowstone verify`; load another checkpoint",
    )


class _Decoder:
    """Decodes one node."""

    def __init__(self) -> None:
        self._depth = 0

    def value(self, node: object, path: Path) -> object:
        if node is None or type(node) is bool:
            return node
        if type(node) is int:
            if not -INT_MAX <= node <= INT_MAX:
                raise _damaged(path, "an int from -2^53 to 2^53", node)
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
            raise _damaged(path, "string keys", list(node))
        tags = [key for key in entries if key[:1] == "$"]
        if not tags:
            references = _references(entries.values())
            if references is not None:
                return dict(zip(entries, references, strict=True))
            return {key: self.value(item, (path, key)) for key, item in entries.items()}
        if len(tags) > 1:
            raise _damaged(path, "one key that names the type", tags)
        tag = tags[0]
        if tag not in _LEAF_TAGS and tag not in _NODE_TAGS:
            raise UnsupportedFormatError(
                f"the object '{dotted_path(path)}' is of a type that this version cannot read",
                found=short_repr(tag),
                next="load it with the version of flowstone that saved it, or a later one",
            )
        try:
            if tag in _LEAF_TAGS and len(node) == 1:
                return _LEAF_TAGS[tag](node[tag])
            return self._tagged(tag, entries, path)
        except (ValueError, TypeError, OverflowError) as error:
            raise _damaged(path, f"a valid {tag} ({error!s:.200})", node[tag]) from error

    def _tagged(self, tag: str, node: dict[str, object], path: Path) -> object:
        """The value of a tagged node that has more keys than its tag, or contains other nodes."""
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
                return range(*(expect_type(item, int) for item in expect_three(self.values(part, path))))
            case "$slice", []:
                return slice(*expect_three(self.values(part, path)))
            case "$complex", []:
                real, imag = (expect_type(item, float) for item in self.values(part, path))
                return complex(real, imag)
            case "$named", ["text"]:
                return NamedConstant(expect_type(part, str), expect_type(node["text"], str))
            case "$numpy", ["hex"]:
                return read_scalar(expect_type(part, str), node["hex"])
            case "$numpy", ["text"] if part == "str":
                return np.str_(expect_type(self.value(node["text"], path), str))
            case "$numpy", ["data"] if part == "bytes":
                return np.bytes_(from_base64(node["data"]))
            case "$provided", ["objects", "parts"]:
                return self._provided(part, node["parts"], node["objects"], path)
        raise ValueError(f"no value of this type has the keys {short_repr(sorted(node))}")

    def values(self, node: object, path: Path) -> list[object]:
        references = _references(expect_type(node, list))
        if references is not None:
            return cast("list[object]", references)
        return [self.value(item, (path, i)) for i, item in enumerate(expect_type(node, list))]

    def pairs(self, node: object, path: Path) -> dict[object, object]:
        pairs = [expect_pair(item) for item in expect_type(node, list)]
        keys, nodes = [key for key, _ in pairs], [value for _, value in pairs]
        names = checked_keys(self.values(keys, (path, KEYS)))
        values: Iterable[object] | None = _references(nodes)
        if values is None:
            values = [self.value(value, (path, name)) for name, value in zip(names, nodes, strict=True)]
        decoded = dict(zip(names, values, strict=True))
        if len(decoded) != len(pairs):
            raise ValueError("two keys of a dict are equal")
        return decoded

    def _members(self, node: object, path: Path) -> set[object]:
        members = set(checked_keys(self.values(node, path)))
        if len(members) != len(cast("list[object]", node)):
            raise ValueError("two members of a set are equal")
        return members

    def _counter(self, node: object, path: Path) -> Counter[object]:
        counter: Counter[object] = Counter()
        for key, count in self.pairs(node, path).items():
            counter[key] = cast("int", count)  # may be any value: a Counter does not check it, either
        return counter

    def _provided(self, kind: object, parts: object, values: object, path: Path) -> ProviderRecord:
        parts_by_name, objects_by_name = (expect_type(self.value(field, path), dict) for field in (parts, values))
        if set(map(type, (*parts_by_name, *objects_by_name))) - {str}:
            raise TypeError("the names of parts and objects must be strings")
        for part in parts_by_name.values():
            if expect_type(part, TensorRef).kind not in ("tensor", "ndarray"):
                raise ValueError("the parts of an object must be tensors or arrays")
        return ProviderRecord(expect_type(kind, str), parts_by_name, objects_by_name)

    def _deque(self, node: object, maxlen: object, path: Path) -> deque[object]:
        items = self.values(node, path)
        if maxlen is not None and len(items) > expect_type(maxlen, int):
            raise ValueError("a deque has more items than its maxlen")
        return deque(items, cast("int | None", maxlen))


def _references(nodes: Collection[object]) -> list[TensorRef] | None:
    """The references that the nodes represent, if all are references to torch tensors; else None. A fast path for many
    tensors.
    """
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
    return TensorRef(expect_type(node, str), kind)


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
