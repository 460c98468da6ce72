"""Objects with named fields (configurations, containers), stored as their fields, and created from them.

A checkpoint has the name of the class and the values of the fields. The class itself comes from this process: Flowstone
knows the class, `register_class` was called for it, or the state that is passed to `load` has a value of this class. No
name in a file leads to an import, and no method of the class runs: fields are set directly.
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
from flowstone.format.objects import NamedConstant, ProviderRecord
from flowstone.log import log
from flowstone.state.imported import LIVE_VALUES, class_if_imported
from flowstone.state.names import Place
from flowstone.state.records import PerRank

C = TypeVar("C", bound=type)
Fields = dict[str, object]
ENUM = "enum"  # the kind of a NamedConstant that is a member of an enumeration

_APART = (BaseException, bool, bytes, bytearray, dict, float, frozenset, int, list, set, str, np.ndarray, np.generic)
"""Classes derived from these are refused, as their objects have content in addition to the fields."""


class ClassForm:
    """How objects of a class are taken apart into fields: by default, into their attributes.

    inline  a field whose items get names as if they were items of the object itself; None: there is none
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

    def is_mutable(self, value: Any) -> bool:
        """Whether the fields of an existing object can be set."""
        return True

    def fill(self, target: Any, fields: Fields) -> None:
        """Set the fields of an existing object."""
        for name in vars(target).keys() - fields.keys():
            object.__delattr__(target, name)
        for name, value in fields.items():
            object.__setattr__(target, name, value)

    def accepts(self, own: Any, fields: Mapping[str, object]) -> bool:
        """Whether objects of the class `own` can be made from these fields."""
        return True


class _DataclassForm(ClassForm):
    """Dataclasses and attrs classes: the fields that the class declares."""

    def fields(self, value: Any) -> Fields:
        return {name: getattr(value, name) for name in field_names(type(value)) if hasattr(value, name)}

    def make(self, own: Any, fields: Fields) -> object:
        made = object.__new__(own)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    def is_mutable(self, value: Any) -> bool:
        parameters = getattr(value, "__dataclass_params__", None)
        return not (parameters.frozen if parameters is not None else _is_frozen(type(value)))

    def fill(self, target: Any, fields: Fields) -> None:
        for name, value in fields.items():
            object.__setattr__(target, name, value)

    def accepts(self, own: Any, fields: Mapping[str, object]) -> bool:
        return fields.keys() <= set(field_names(own))


class _NamedTupleForm(ClassForm):
    def fields(self, value: Any) -> Fields:
        return dict(zip(value._fields, value, strict=True))

    def make(self, own: Any, fields: Fields) -> object:
        return tuple.__new__(own, [fields[name] for name in own._fields])

    def is_mutable(self, value: Any) -> bool:
        return False

    def accepts(self, own: Any, fields: Mapping[str, object]) -> bool:
        return fields.keys() == set(own._fields)


class _OrderedDictForm(ClassForm):
    """An OrderedDict with attributes, such as a state_dict() of torch (versions) or tensordict (nesting)."""

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

    def accepts(self, own: Any, fields: Mapping[str, object]) -> bool:
        return isinstance(fields.get("items"), dict) and type(fields.get("attributes")) is dict


class _DefaultDictForm(ClassForm):
    """A defaultdict. Its factory is stored by name. A load finds the factory by that name if it is a built-in or
    standard-library class that Flowstone knows (such as list, or collections.Counter), a class for which
    `register_class` was called, or a class or function in the state that is passed to `load`.
    """

    inline = "items"

    def fields(self, value: Any) -> Fields:
        factory = value.default_factory and name_of(value.default_factory)
        if factory is not None and "<lambda>" in factory:
            raise TypeError("its default_factory is a lambda, which has no name: define a function")
        return {"items": dict(value), "factory": factory}

    def make(self, own: Any, fields: Fields) -> object:
        factory = fields["factory"] and CLASSES.find(cast("str", fields["factory"]))
        return collections.defaultdict(cast("Any", factory), cast("Mapping[object, object]", fields["items"]))

    def fill(self, target: Any, fields: Fields) -> None:
        target.clear()
        target.update(fields["items"])

    def accepts(self, own: Any, fields: Mapping[str, object]) -> bool:
        factory = fields.get("factory")
        is_known = factory is None or (type(factory) is str and CLASSES.find(factory) is not None)
        return is_known and isinstance(fields.get("items"), dict)


class _BytesStreamForm(ClassForm):
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

    def accepts(self, own: Any, fields: Mapping[str, object]) -> bool:
        # The bytes of the object may be stored separately, as a tensor.
        position = fields.get("position")
        return "data" in fields and type(position) is int and position >= 0


class _ObjectArrayForm(ClassForm):
    """A numpy array of text or of objects, item by item."""

    inline = "items"

    def fields(self, value: Any) -> Fields:
        return {"dtype": value.dtype.str, "shape": value.shape, "items": value.ravel().tolist()}

    def make(self, own: Any, fields: Fields) -> object:
        items = cast("list[object]", fields["items"])
        made = np.empty(len(items), _array_dtype(fields["dtype"]))
        for index, item in enumerate(items):  # one by one: numpy would unpack an item that is a sequence
            made[index] = item
        return made.reshape(cast("tuple[int, ...]", fields["shape"]))

    def is_mutable(self, value: Any) -> bool:
        return False

    def accepts(self, own: Any, fields: Mapping[str, object]) -> bool:
        shape, items = fields.get("shape"), fields.get("items")
        if type(shape) is not tuple or type(items) is not list or not all(type(side) is int for side in shape):
            return False
        try:
            _array_dtype(fields.get("dtype"))
        except TypeError:
            return False
        return min(shape, default=0) >= 0 and len(items) == int(np.prod(shape, dtype=object))


def _array_dtype(text: object) -> np.dtype[Any]:
    """The dtype of an array that is stored item by item. Raises TypeError for other dtypes."""
    if type(text) is not str or not re.fullmatch(r"\|O|[<>]U[0-9]{1,9}|\|S[0-9]{1,9}", text):
        raise TypeError(f"{text!r:.40} is not a dtype of text or objects")
    return np.dtype(text)


class _OmegaConfForm(ClassForm):
    """OmegaConf's containers of plain values; interpolations are stored unresolved."""

    inline = "content"

    def fields(self, value: Any) -> Fields:
        omegaconf: Any = class_if_imported("omegaconf", "OmegaConf")
        if omegaconf.get_type(value) not in (dict, list):
            raise TypeError("structured configs of OmegaConf cannot be saved: save OmegaConf.to_container(config)")
        flags = value.__dict__["_metadata"].flags or {}
        return {"content": omegaconf.to_container(value, resolve=False), "flags": dict(flags)}

    def make(self, own: Any, fields: Fields) -> object:
        omegaconf: Any = class_if_imported("omegaconf", "OmegaConf")
        return omegaconf.create(fields["content"], flags=fields["flags"] or None)

    def is_mutable(self, value: Any) -> bool:
        return False

    def accepts(self, own: Any, fields: Mapping[str, object]) -> bool:
        return type(fields.get("content")) in (dict, list) and type(fields.get("flags")) is dict


class _RegisteredForm(ClassForm):
    """Objects of a class that was registered with two functions."""

    def __init__(self, fields: Callable[[Any], Fields], create: Callable[[Fields], object]) -> None:
        self._fields, self._create = fields, create

    def fields(self, value: Any) -> Fields:
        return dict(self._fields(value))

    def make(self, own: Any, fields: Fields) -> object:
        return self._create(fields)

    def is_mutable(self, value: Any) -> bool:
        return False


_ATTRIBUTES, _DECLARED, _TUPLE = ClassForm(), _DataclassForm(), _NamedTupleForm()
_BUILT_IN: Mapping[type, ClassForm] = {
    argparse.Namespace: _ATTRIBUTES, types.SimpleNamespace: _ATTRIBUTES, collections.OrderedDict: _OrderedDictForm(),
    collections.defaultdict: _DefaultDictForm(), io.BytesIO: _BytesStreamForm(), np.ndarray: _ObjectArrayForm(),
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


def field_names(own: type) -> tuple[str, ...]:
    """The names of the fields of a dataclass, or of an attrs class."""
    if dataclasses.is_dataclass(own):
        return tuple(field.name for field in dataclasses.fields(own))
    return tuple(field.name for field in getattr(own, "__attrs_attrs__", ()))


def _is_frozen(own: type) -> bool:
    return "frozen" in getattr(own.__setattr__, "__name__", "")


def form_of(own: type) -> ClassForm | None:
    """How objects of exactly this class are taken apart; None if the class is not supported."""
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
    return _OmegaConfForm() if attribute is not None and own is class_if_imported("omegaconf", attribute) else None


class ClassRegistry:
    """Classes by their names in checkpoints. There is one registry for the process, as classes belong to the process.

    forms, names  for each class for which `register_class` was called: how it is taken apart, and its name
    """

    def __init__(self) -> None:
        self.forms: dict[type, ClassForm] = {}
        self.names: dict[type, str] = {io.BytesIO: "io.BytesIO"}  # its own __module__ is _io
        self._by_name: dict[str, object] = {
            self.names.get(own) or _plain(own): own for own in (*_BUILT_IN, *_FACTORIES)
        }
        self._live: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._warned: set[str] = set()

    def add(self, own: type, name: str, form: ClassForm | None) -> None:
        registered = self._by_name.get(name)
        if registered not in (None, own):
            raise ProviderError(
                f"cannot register a second class as '{name}'", found=name_of(registered),
                next="register this class under another name",
            )
        self._by_name[name] = own
        self.names[own] = name
        if form is not None:
            self.forms[own] = form

    def registered(self, name: str) -> object:
        """The class with that name in checkpoints, if Flowstone knows it or `register_class` was called for it;
        otherwise None.
        """
        return class_if_imported("omegaconf", _OMEGACONF[name]) if name in _OMEGACONF else self._by_name.get(name)

    def find(self, name: str) -> object:
        """The class with that name in checkpoints; None if neither this process nor the state that is passed to `load`
        has it.
        """
        own = self.registered(name) or self._live.get(name)
        state = LIVE_VALUES.get()
        if own is None and state:
            values = list(state)
            state.clear()
            for value in values:
                self._note(value, set())
            own = self._live.get(name)
        return own

    def warn_unknown(self, own: Any, place: Place) -> None:
        """Log once that a load in another process may not know the class (or the factory function) of a saved value."""
        name = name_of(own)
        if name in self._warned or self.find(name) is own:
            return
        self._warned.add(name)
        is_class = isinstance(own, type)
        log.warning(
            "the %s of '%s', %s, is not registered: a load can restore such an object only into a state that already "
            "has one. %s", "class" if is_class else "default_factory", place.name, name,
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
            return  # classes inside of this value stay unknown, and a load that needs one is refused
        for item in inside:
            self._note(item, seen)


def _inside(value: Any) -> list[object]:
    """The items of a container; for an object, the values in its state_dict()."""
    form = form_of(type(value))
    if isinstance(value, dict):
        return [*value, *value.values()]
    if form is not None:
        return list(form.fields(value).values())
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return list(value)
    if isinstance(value, PerRank):
        return [value.value]
    module, optimizer = class_if_imported("torch.nn", "Module"), class_if_imported("torch.optim", "Optimizer")
    if module is not None and isinstance(value, module):
        with_extra = [inner for inner in value.modules() if type(inner).get_extra_state is not module.get_extra_state]
        return [inner.get_extra_state() for inner in with_extra]
    if optimizer is not None and isinstance(value, optimizer):
        return list(value.param_groups)
    has_state = callable(getattr(value, "state_dict", None)) and not isinstance(value, type)
    return [value.state_dict()] if has_state else []


def _plain(own: type) -> str:
    return f"{own.__module__}.{own.__qualname__}"


CLASSES = ClassRegistry()


def form_of_node(node: ProviderRecord) -> ClassForm | None:
    """How to make an object from `node`, its stored form. None if this process does not know the class, or if the class
    has other fields than the stored form.
    """
    own = CLASSES.find(node.kind)
    form = form_of(own) if isinstance(own, type) else None
    return form if form is not None and form.accepts(own, node.objects) else None


def unknown_classes(node: object) -> Iterator[str]:
    """Among the classes of the values in a stored object: the names of those that this process does not know. No load
    can create their values.
    """
    if isinstance(node, NamedConstant):
        own = node.text.rpartition(".")[0]
        if node.kind == ENUM and CLASSES.registered(own) is None:
            yield own
    elif isinstance(node, ProviderRecord):
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


def make_object(node: ProviderRecord, build: Callable[[object], object]) -> object:
    """Create an object from `node`, its stored form. `build` makes the value of a field from the stored value. The
    class must be known: `form_of_node` does not return None for `node`.
    """
    own, form = CLASSES.find(node.kind), form_of_node(node)
    assert form is not None, "the class was known at the request"
    return form.make(own, {name: build(item) for name, item in node.objects.items()})


def register_class(
    own: C | None = None, *, name: str | None = None, fields: Callable[[Any], dict[str, object]] | None = None,
    create: Callable[[dict[str, object]], object] | None = None,
) -> Any:
    """Allow loads to create objects of a class: a dataclass, a NamedTuple, an attrs class, an enumeration; or any
    other class, with two functions. Also usable as a decorator.

    name    name in checkpoints; None: the qualified name. Give a name if the class may be renamed or moved
    fields  a function that returns an object's values by name; each must be a value that a state may contain
    create  a function that makes an object from these values

    A class need not be registered if the state that is passed to `load` has an object of that class. A registration
    holds for the whole process, so register the class where it is defined.

    raises  ProviderError  for any other class without the two functions; for a name that another class has
    """

    def register(own: C) -> C:
        if not isinstance(own, type) or (fields is None) != (create is None):
            raise ProviderError(
                f"{own!r:.60} cannot be registered", expected="a class, with both `fields` and `create` or neither",
                next="write register_class(YourClass), or give it both functions",
            )
        if fields is not None and create is not None:
            form: ClassForm | None = _RegisteredForm(fields, create)
        elif issubclass(own, enum.Enum) or form_of(own) is not None:
            form = None
        else:
            raise ProviderError(
                f"{_plain(own)} is not a dataclass, NamedTuple, enumeration, or attrs class",
                next="give `fields`, which takes its objects apart, and `create`, which makes them",
            )
        CLASSES.add(own, name or _plain(own), form)
        return own

    return register if own is None else register(own)
