"""Objects of classes: configurations and containers with named fields, taken apart and put together again.

A checkpoint has the name of the class and the values of the fields. The class itself comes from this process: from the
table of what Flowstone knows, from `register_class`, or from a value of the state that is loaded. No name in a file
leads to an import, and no method of the class runs: fields are set as they were.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
import re
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import numpy as np

from flowstone.errors import ProviderError
from flowstone.format.objects import Named, Provided
from flowstone.log import log
from flowstone.state.imported import LIVE_VALUES, imported
from flowstone.state.names import Place

C = TypeVar("C", bound=type)
Fields = dict[str, object]
ENUM = "enum"  # the kind of a Named that is a member of an enumeration

_APART = (BaseException, bool, bytes, bytearray, dict, float, frozenset, int, list, set, str, np.ndarray, np.generic)
"""Classes derived from these have content beside their fields."""


class Form:
    """How objects of a class are taken apart into fields: by default, into their attributes.

    inline  the field whose items are named as if they were the object's own items
    """

    inline: str | None = None

    def fields(self, value: Any) -> Fields:
        """The values of the fields, by name."""
        return dict(vars(value))

    def make(self, own: Any, fields: Fields) -> object:
        """A new object of the class `own`."""
        made = own()
        vars(made).update(fields)
        return cast("object", made)

    def changes(self, value: Any) -> bool:
        """Whether an existing object can be given other fields."""
        return True

    def fill(self, target: Any, fields: Fields) -> None:
        """Give an existing object other fields."""
        for name in vars(target).keys() - fields.keys():
            object.__delattr__(target, name)
        for name, value in fields.items():
            object.__setattr__(target, name, value)

    def fits(self, own: Any, fields: Mapping[str, object]) -> bool:
        """Whether the class has these fields."""
        return True


class _Dataclass(Form):
    """Dataclasses and classes of attrs: the fields that the class declares."""

    def fields(self, value: Any) -> Fields:
        return {name: getattr(value, name) for name in declared(type(value)) if hasattr(value, name)}

    def make(self, own: Any, fields: Fields) -> object:
        made = object.__new__(own)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    def changes(self, value: Any) -> bool:
        parameters = getattr(value, "__dataclass_params__", None)
        return not (parameters.frozen if parameters is not None else _is_frozen(type(value)))

    def fill(self, target: Any, fields: Fields) -> None:
        for name, value in fields.items():
            object.__setattr__(target, name, value)

    def fits(self, own: Any, fields: Mapping[str, object]) -> bool:
        return fields.keys() <= set(declared(own))


class _NamedTuple(Form):
    def fields(self, value: Any) -> Fields:
        return dict(zip(value._fields, value, strict=True))

    def make(self, own: Any, fields: Fields) -> object:
        return tuple.__new__(own, [fields[name] for name in own._fields])

    def changes(self, value: Any) -> bool:
        return False

    def fits(self, own: Any, fields: Mapping[str, object]) -> bool:
        return fields.keys() == set(own._fields)


class _Ordered(Form):
    """An OrderedDict with attributes: torch keeps versions in those of a state_dict(), tensordict the nesting."""

    inline = "items"

    def fields(self, value: Any) -> Fields:
        return {"items": collections.OrderedDict(value.items()), "attributes": vars(value)}

    def make(self, own: Any, fields: Fields) -> object:
        made: Any = collections.OrderedDict(cast("Mapping[object, object]", fields["items"]))
        vars(made).update(cast("Fields", fields["attributes"]))
        return made

    def fill(self, target: Any, fields: Fields) -> None:
        target.clear()
        target.update(fields["items"])
        attributes = dict(cast("Fields", fields["attributes"]))
        vars(target).clear()
        vars(target).update(attributes)

    def fits(self, own: Any, fields: Mapping[str, object]) -> bool:
        return isinstance(fields.get("items"), dict) and type(fields.get("attributes")) is dict


class _DefaultDict(Form):
    """A defaultdict, whose factory is a class of Python's, or registered by name."""

    inline = "items"

    def fields(self, value: Any) -> Fields:
        factory = value.default_factory and name_of(value.default_factory)
        if factory is not None and "<lambda>" in factory:
            raise TypeError("its default_factory is a lambda, which has no name: define a function")
        return {"items": dict(value), "factory": factory}

    def make(self, own: Any, fields: Fields) -> object:
        factory = fields["factory"] and CLASSES.of(cast("str", fields["factory"]))
        return collections.defaultdict(cast("Any", factory), cast("Mapping[object, object]", fields["items"]))

    def fill(self, target: Any, fields: Fields) -> None:
        target.clear()
        target.update(fields["items"])

    def fits(self, own: Any, fields: Mapping[str, object]) -> bool:
        factory = fields.get("factory")
        known = factory is None or (type(factory) is str and CLASSES.of(factory) is not None)
        return known and isinstance(fields.get("items"), dict)


class _BytesStream(Form):
    def fields(self, value: Any) -> Fields:
        return {"data": value.getvalue(), "position": value.tell()}

    def make(self, own: Any, fields: Fields) -> object:
        made = io.BytesIO(cast("bytes", fields["data"]))
        made.seek(cast("int", fields["position"]))
        return made

    def fill(self, target: Any, fields: Fields) -> None:
        target.seek(0)
        target.truncate()
        target.write(fields["data"])
        target.seek(fields["position"])

    def fits(self, own: Any, fields: Mapping[str, object]) -> bool:
        # The data may be elsewhere, as a tensor.
        position = fields.get("position")
        return "data" in fields and type(position) is int and position >= 0


class _ObjectArray(Form):
    """A numpy array of text or of objects, item by item."""

    inline = "items"

    def fields(self, value: Any) -> Fields:
        return {"dtype": value.dtype.str, "shape": value.shape, "items": value.ravel().tolist()}

    def make(self, own: Any, fields: Fields) -> object:
        items = cast("list[object]", fields["items"])
        made = np.empty(len(items), _array_dtype(fields["dtype"]))
        for at, item in enumerate(items):  # one by one: numpy would unpack an item that is a sequence
            made[at] = item
        return made.reshape(cast("tuple[int, ...]", fields["shape"]))

    def changes(self, value: Any) -> bool:
        return False

    def fits(self, own: Any, fields: Mapping[str, object]) -> bool:
        shape, items = fields.get("shape"), fields.get("items")
        if type(shape) is not tuple or type(items) is not list or not all(type(side) is int for side in shape):
            return False
        try:
            _array_dtype(fields.get("dtype"))
        except TypeError:
            return False
        return min(shape, default=0) >= 0 and len(items) == int(np.prod(shape, dtype=object))


def _array_dtype(text: object) -> np.dtype[Any]:
    """The dtype of an array that is stored item by item. Raises TypeError for another."""
    if type(text) is not str or not re.fullmatch(r"\|O|[<>]U[0-9]{1,9}|\|S[0-9]{1,9}", text):
        raise TypeError(f"{text!r:.40} is not a dtype of text or objects")
    return np.dtype(text)


class _OmegaConf(Form):
    """OmegaConf's containers of plain values; interpolations are stored unresolved."""

    inline = "content"

    def fields(self, value: Any) -> Fields:
        omegaconf: Any = imported("omegaconf", "OmegaConf")
        if omegaconf.get_type(value) not in (dict, list):
            raise TypeError("it is a structured config: save OmegaConf.to_container() of it")
        flags = value.__dict__["_metadata"].flags or {}
        return {"content": omegaconf.to_container(value, resolve=False), "flags": dict(flags)}

    def make(self, own: Any, fields: Fields) -> object:
        omegaconf: Any = imported("omegaconf", "OmegaConf")
        return omegaconf.create(fields["content"], flags=fields["flags"] or None)

    def changes(self, value: Any) -> bool:
        return False

    def fits(self, own: Any, fields: Mapping[str, object]) -> bool:
        return type(fields.get("content")) in (dict, list) and type(fields.get("flags")) is dict


class _RegisteredForm(Form):
    """Objects of a class that was registered with two functions."""

    def __init__(self, fields: Callable[[Any], Fields], create: Callable[[Fields], object]) -> None:
        self._fields, self._create = fields, create

    def fields(self, value: Any) -> Fields:
        return dict(self._fields(value))

    def make(self, own: Any, fields: Fields) -> object:
        return self._create(fields)

    def changes(self, value: Any) -> bool:
        return False


_ATTRIBUTES, _DECLARED, _TUPLE = Form(), _Dataclass(), _NamedTuple()
_BUILT_IN: Mapping[type, Form] = {
    argparse.Namespace: _ATTRIBUTES, types.SimpleNamespace: _ATTRIBUTES, collections.OrderedDict: _Ordered(),
    collections.defaultdict: _DefaultDict(), io.BytesIO: _BytesStream(), np.ndarray: _ObjectArray(),
}
_FACTORIES = (
    bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple, type(None),
    collections.Counter, collections.OrderedDict, collections.deque,
)
_OMEGACONF = {"omegaconf.dictconfig.DictConfig": "DictConfig", "omegaconf.listconfig.ListConfig": "ListConfig"}


def name_of(own: Any) -> str:
    """The name of a class, or of a function that makes values, in checkpoints."""
    given = CLASSES.names.get(own) if isinstance(own, type) else None
    return given or f"{getattr(own, '__module__', '?')}.{getattr(own, '__qualname__', type(own).__qualname__)}"


def declared(own: type) -> tuple[str, ...]:
    """The names of the fields of a dataclass, or of a class of attrs."""
    if dataclasses.is_dataclass(own):
        return tuple(field.name for field in dataclasses.fields(own))
    return tuple(field.name for field in getattr(own, "__attrs_attrs__", ()))


def _is_frozen(own: type) -> bool:
    return "frozen" in getattr(own.__setattr__, "__name__", "")


def form_of(own: type) -> Form | None:
    """How objects of exactly this class are taken apart; None if they are not."""
    form = CLASSES.forms.get(own) or _BUILT_IN.get(own)
    if form is not None:
        return form
    if issubclass(own, tuple):
        return _TUPLE if isinstance(getattr(own, "_fields", None), tuple) else None
    if issubclass(own, _APART):
        return None
    if dataclasses.is_dataclass(own) or hasattr(own, "__attrs_attrs__"):
        return _DECLARED
    attribute = _OMEGACONF.get(f"{own.__module__}.{own.__qualname__}")
    return _OmegaConf() if attribute is not None and own is imported("omegaconf", attribute) else None


class Classes:
    """Classes by their names in checkpoints. There is one instance: classes belong to the process.

    forms, names  of those that `register_class` was called for
    """

    def __init__(self) -> None:
        self.forms: dict[type, Form] = {}
        self.names: dict[type, str] = {io.BytesIO: "io.BytesIO"}  # its own __module__ is _io
        self._by_name: dict[str, object] = {
            self.names.get(own) or _plain(own): own for own in (*_BUILT_IN, *_FACTORIES)
        }
        self._live: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._warned: set[str] = set()

    def add(self, own: type, name: str, form: Form | None) -> None:
        known = self._by_name.get(name)
        if known not in (None, own):
            raise ProviderError(
                f"cannot register a second class as '{name}'", found=name_of(known), next="give it another name"
            )
        self._by_name[name] = own
        self.names[own] = name
        if form is not None:
            self.forms[own] = form

    def registered(self, name: str) -> object:
        """The class of that name, if every process that makes the same calls of `register_class` has one."""
        return imported("omegaconf", _OMEGACONF[name]) if name in _OMEGACONF else self._by_name.get(name)

    def of(self, name: str) -> object:
        """The class of that name; None if neither the process nor the state that is being loaded has one."""
        found = self.registered(name) or self._live.get(name)
        state = LIVE_VALUES.get()
        if found is None and state:
            values = list(state)
            state.clear()
            for value in values:
                self._note(value, set())
            found = self._live.get(name)
        return found

    def warn_unknown(self, own: Any, place: Place) -> None:
        """Log one warning for a class, or a factory, of a saved value that another process may not know at its load."""
        name = name_of(own)
        if name in self._warned or self.of(name) is own:
            return
        self._warned.add(name)
        is_class = isinstance(own, type)
        log.warning(
            "the %s of '%s', %s, is not registered: a load is refused if the live state has no value with it. %s",
            "class" if is_class else "default_factory", place.name, name,
            f"Call fs.register_class({own.__qualname__})" if is_class else "Use a class, and register it",
        )

    def _note(self, value: Any, seen: set[int]) -> None:
        own = type(value)
        if id(value) in seen or own in (str, int, float, bool):
            return
        seen.add(id(value))
        if isinstance(value, enum.Enum):
            self._live[name_of(own)] = own
            return
        if form_of(own) is not None and own not in _BUILT_IN:
            self._live[name_of(own)] = own
        factory = getattr(value, "default_factory", None) if isinstance(value, dict) else None
        if factory is not None and self._by_name.get(name_of(factory)) is None:
            self._live[name_of(factory)] = factory
        try:
            inside = _inside(value)
        except Exception:
            return  # safe: the classes in it stay unknown, and a load that needs one is refused
        for item in inside:
            self._note(item, seen)


def _inside(value: Any) -> list[object]:
    """The values inside of a value of the state; of an object, those in its state_dict()."""
    form = form_of(type(value))
    if isinstance(value, dict):
        return [*value, *value.values()]
    if form is not None:
        return list(form.fields(value).values())
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return list(value)
    if type(value).__name__ == "PerRank":
        return [value.value]
    module, optimizer = imported("torch.nn", "Module"), imported("torch.optim", "Optimizer")
    if module is not None and isinstance(value, module):
        with_extra = [one for one in value.modules() if type(one).get_extra_state is not module.get_extra_state]
        return [one.get_extra_state() for one in with_extra]
    if optimizer is not None and isinstance(value, optimizer):
        return list(value.param_groups)
    has_state = callable(getattr(value, "state_dict", None)) and not isinstance(value, type)
    return [value.state_dict()] if has_state else []


def _plain(own: type) -> str:
    return f"{own.__module__}.{own.__qualname__}"


CLASSES = Classes()


def form_of_node(node: Provided) -> Form | None:
    """How to make the stored object; None if its class is unknown, or has other fields."""
    own = CLASSES.of(node.kind)
    form = form_of(own) if isinstance(own, type) else None
    return form if form is not None and form.fits(own, node.objects) else None


def unknown_classes(node: object) -> Iterator[str]:
    """The classes that are named in a stored object, and of which no value can be made without a live one."""
    if isinstance(node, Named):
        own = node.text.rpartition(".")[0]
        if node.kind == ENUM and CLASSES.registered(own) is None:
            yield own
    elif isinstance(node, Provided):
        if node.parts or CLASSES.registered(node.kind) is None or form_of_node(node) is None:
            yield node.kind
        yield from unknown_classes(node.objects)
    elif isinstance(node, dict):
        for key, item in node.items():
            yield from unknown_classes(key)
            yield from unknown_classes(item)
    elif isinstance(node, (list, tuple, set, frozenset, collections.deque)):
        for item in node:
            yield from unknown_classes(item)


def make(node: Provided, build: Callable[[object], object]) -> object:
    """A new object for a stored one that `form_of_node` knows. `build` makes the values of its fields."""
    own, form = CLASSES.of(node.kind), form_of_node(node)
    assert form is not None, "its class was known when it was wanted"
    return form.make(own, {name: build(item) for name, item in node.objects.items()})


def register_class(
    own: C | None = None, *, name: str | None = None, fields: Callable[[Any], dict[str, object]] | None = None,
    create: Callable[[dict[str, object]], object] | None = None,
) -> Any:
    """Allow loads to create objects of a class: a dataclass, a NamedTuple, a class of attrs, an enumeration; or of any
    other class, with two functions. Also a decorator.

    name    in checkpoints; None: its qualified name. Give one if the class may be renamed or moved
    fields  takes an object apart into values by name, each of a kind that a state may have
    create  makes an object from these values

    Not needed if the state that is loaded has an object of that class: then the class is known. A registration holds
    for the process: call this where the class is defined.

    raises  ProviderError  for any other class without the two functions; for a name that another class has
    """

    def register(own: C) -> C:
        if not isinstance(own, type) or (fields is None) != (create is None):
            raise ProviderError(
                f"{own!r:.60} cannot be registered", expected="a class; both of `fields` and `create`, or none",
                next="write register_class(YourClass), or give it both functions",
            )
        if fields is not None and create is not None:
            form: Form | None = _RegisteredForm(fields, create)
        elif issubclass(own, enum.Enum) or form_of(own) is not None:
            form = None
        else:
            raise ProviderError(
                f"{_plain(own)} is not a dataclass, NamedTuple, enumeration, or class of attrs",
                next="give `fields`, which takes its objects apart, and `create`, which makes them",
            )
        CLASSES.add(own, name or _plain(own), form)
        return own

    return register if own is None else register(own)
