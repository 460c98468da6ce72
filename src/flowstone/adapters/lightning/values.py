"""Values of a Lightning checkpoint that neither are tensors nor have a form in JSON: as plain ones, and back.

What has become of each is in one section more, RECORD. Classes are looked up among those that the process has
imported; nothing is imported, and nothing but enumerations and named tuples is made of a class that a file names.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from typing import Any, cast

import msgspec
import numpy as np
import torch

from flowstone.errors import UnsupportedFormatError, UnsupportedStateError
from flowstone.state.constants import named

RECORD = "__lightning__"
"""The section that is ours; no section of a Checkpointer begins so."""

VERSION = 1
_SHOWN = 20
_LEAVES = frozenset({
    type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, set, frozenset, Counter, np.ndarray,
})
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) if hasattr(torch.nn, "Buffer") else (
    torch.Tensor, torch.nn.Parameter,
)
_FACTORIES: Mapping[str, type] = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool)}
_REMEDIES = {
    "hyper_parameters": "leave it out: self.save_hyperparameters(ignore=[{name!r}])",
    "datamodule_hyper_parameters": "leave it out: self.save_hyperparameters(ignore=[{name!r}])",
    "hparams_type": "give plain values: self.save_hyperparameters(OmegaConf.to_container(config))",
    "callbacks": "let the callback's state_dict() return tensors and plain values",
    "state_dict": "let the module's get_extra_state() return tensors and plain values",
}
_PARTS_REMEDY = "save the parts of all ranks by a Checkpointer, in a callback: docs/RECIPES.md, Lightning"
_REMEDY = "convert it to tensors or plain values before the save, or leave it out"


class Plain(msgspec.Struct, frozen=True):
    """sections: tensors and plain values alone. record: what RECORD is to say; None if nothing was changed."""

    sections: dict[str, object]
    record: dict[str, object] | None


def plain(checkpoint: Mapping[str, object]) -> Plain:
    """A checkpoint of Lightning with plain values for all others. Containers are new, tensors are the same.

    raises  UnsupportedStateError naming everything that has no such form
    """
    walk = _Walk()
    sections = {key: walk.value(item, (key,)) for key, item in checkpoint.items()}
    if walk.refused:
        raise UnsupportedStateError(
            f"{len(walk.refused)} value(s) of the checkpoint cannot be stored: nothing is pickled",
            values="\n".join(walk.refused[:_SHOWN]), next=walk.remedy,
        )
    changes: list[object] = [[list(path), kind, extra] for path, kind, extra in walk.changes]
    return Plain(sections, {"version": VERSION, "changes": changes} if changes else None)


def restored(sections: dict[str, object], record: object) -> dict[str, object]:
    """The checkpoint that `plain` has made `sections` of. In place, as far as containers can be changed."""
    if record is None:
        return sections
    if not isinstance(record, Mapping) or record.get("version") != VERSION:
        raise UnsupportedFormatError(
            f"{RECORD} is of another version", expected=VERSION, found=repr(record)[:100], next="update flowstone"
        )
    # Inner values first: they were noted after those that they are in.
    for path, kind, extra in reversed(cast("list[tuple[list[object], str, object]]", record["changes"])):
        _at(sections, path, partial(_made, kind, extra))
    return sections


def _at(root: dict[str, object], path: list[object], make: Callable[[object], object]) -> None:
    """Replace what lies at `path` by what is made of it; tuples on the way are made anew."""
    def inside(node: Any, depth: int) -> object:
        if depth == len(path):
            return make(node)
        key = path[depth]
        found = inside(node[key], depth + 1)
        if isinstance(node, tuple):
            at = cast("int", key)
            return (*node[:at], found, *node[at + 1 :])
        node[key] = found
        return node

    inside(root, 0)


class _Walk:
    """One walk over a checkpoint.

    changes  path, kind and what else has to be known of each value that was replaced, outer ones first
    """

    def __init__(self) -> None:
        self.changes: list[tuple[tuple[object, ...], str, object]] = []
        self.refused: list[str] = []
        self.remedy = ""
        self._shared: dict[tuple[object, ...], torch.Tensor] = {}

    def value(self, value: object, path: tuple[object, ...]) -> object:
        kind = type(value)
        if kind in _LEAVES or isinstance(value, np.generic):
            return value
        if named(value) is not None and not isinstance(value, Enum):  # whose classes are looked up in another way here
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is OrderedDict:
            return self._ordered(cast("OrderedDict[object, object]", value), path)
        if kind is dict:
            return self._dict(cast("dict[object, object]", value), path)
        if kind in (list, tuple, deque):
            return self._sequence(cast("list[object]", value), path)
        return self._other(value, path)

    def _tensor(self, value: torch.Tensor, path: tuple[object, ...]) -> object:
        if type(value) not in _TENSORS:
            if hasattr(value, "placements"):
                self._refuse(value, path, _PARTS_REMEDY)
            return value
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            self._refuse(value, path, "convert it to a dense tensor before the save, or leave it out")
        if value.layout is not torch.strided or not value.numel():
            return value
        # Tied ones are one: a state_dict() makes a new tensor for each name.
        key = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
        return self._shared.setdefault(key, value)

    def _ordered(self, value: OrderedDict[object, object], path: tuple[object, ...]) -> object:
        versions = getattr(value, "_metadata", None)  # what modules say of their versions, and look up when they load
        if versions:
            self.changes.append((path, "versions", [[name, dict(said)] for name, said in versions.items()]))
        return OrderedDict((key, self.value(item, (*path, key))) for key, item in value.items())

    def _dict(self, value: Mapping[object, object], path: tuple[object, ...]) -> dict[object, object]:
        return {key: self.value(item, (*path, key)) for key, item in value.items()}

    def _sequence(self, value: Iterable[object], path: tuple[object, ...]) -> object:
        items = [self.value(item, (*path, at)) for at, item in enumerate(value)]
        if isinstance(value, deque):
            return deque(items, value.maxlen)
        return items if isinstance(value, list) else tuple(items)

    def _other(self, value: object, path: tuple[object, ...]) -> object:
        found = _plain_form(value)
        if found is None:
            self._refuse(value, path)
            return None
        node, kind, extra = found
        self.changes.append((path, kind, extra))
        return self.value(node, path)

    def _refuse(self, value: object, path: tuple[object, ...], remedy: str = "") -> None:
        kind = type(value)
        self.refused.append(f"{'.'.join(map(str, path))}: {kind.__module__}.{kind.__qualname__}")
        name = path[1] if len(path) > 1 else path[0]
        self.remedy = self.remedy or remedy or _REMEDIES.get(str(path[0]), _REMEDY).format(name=name)


def _plain_form(value: object) -> tuple[object, str, object] | None:
    """A plain value for one that is none, what it was, and what else has to be known; None if it has no such form."""
    kind = type(value)
    if isinstance(value, Enum):
        return value.name, "enum", _class_name(kind)
    if kind is timedelta:
        return [value.days, value.seconds, value.microseconds], "timedelta", None  # type: ignore[attr-defined]
    if kind in _TIMES.values():
        return cast("date", value).isoformat(), kind.__name__, None
    if isinstance(value, PurePath):
        return str(value), "path", None
    if kind is Namespace:
        return dict(vars(value)), "namespace", None
    if kind is defaultdict:
        factory = getattr(cast("defaultdict[object, object]", value).default_factory, "__name__", None)
        return (dict(cast("dict[object, object]", value)), "defaultdict", factory) if factory in _FACTORIES else None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(value), "namedtuple", [_class_name(kind), list(value._fields)]
    if isinstance(value, dict) and kind.__name__ == "AttributeDict" and "lightning" in kind.__module__:
        return dict(value), "attributes", _class_name(kind)
    return None


_TIMES: Mapping[str, type] = {"date": date, "datetime": datetime, "time": time}


def _made(kind: str, extra: Any, node: Any) -> object:
    """The value that `_plain_form` has made `node` of."""
    if kind == "versions":
        node._metadata = OrderedDict((name, dict(said)) for name, said in extra)
        return node
    if kind in _TIMES:
        return cast("Any", _TIMES[kind]).fromisoformat(node)
    makers: Mapping[str, Callable[[], object]] = {
        "enum": lambda: cast("Any", _known_class(extra, Enum))[node],
        "timedelta": lambda: timedelta(*node),
        "path": lambda: Path(node),
        "namespace": lambda: Namespace(**node),
        "defaultdict": lambda: defaultdict(_FACTORIES[extra], node),
        "namedtuple": lambda: _named_tuple(extra, node),
        "attributes": lambda: cast("Any", _known_class(extra, dict))(node),
    }
    if kind not in makers:
        raise UnsupportedFormatError(f"{RECORD} names an unknown kind of value", found=kind, next="update flowstone")
    return makers[kind]()


def _named_tuple(extra: Any, items: Iterable[object]) -> object:
    kind: Any = _known_class(extra[0], tuple)
    if list(getattr(kind, "_fields", ())) != extra[1]:
        raise UnsupportedFormatError(
            f"the named tuple {extra[0]} has other fields now", expected=", ".join(extra[1]),
            found=", ".join(getattr(kind, "_fields", ())) or "none", next="bring its old fields back",
        )
    return kind(*items)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _known_class(name: str, base: type) -> type:
    """The class of that name, if this process has imported it."""
    module, _, qualified = name.partition(":")
    found: object = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, base):
        raise UnsupportedFormatError(
            f"the checkpoint has a value of a class that is not there: {name}",
            next=f"import {module} before the load; a class inside of a function cannot be found",
        )
    return found
