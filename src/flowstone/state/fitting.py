"""Fitting: put plain values into the existing containers that they replace."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping


class Fitting:
    """Puts plain values into the containers that they replace, so that other references to those see the change.

    A container that occurs at two places of the state takes one value; if the other place was saved with a different
    value, it gets a new container.
    """

    def __init__(self) -> None:
        self._taken: dict[int, tuple[object, object]] = {}

    def fit(self, target: object, value: object) -> object:
        """Put `value` into `target` and the containers inside it, as far as the types agree; returns the result."""
        if type(target) is not type(value) or type(target) in _IMMUTABLE:
            return value
        if type(target) not in _FILL:
            return self._record(target, value)
        if id(target) in self._taken:
            return target if self._taken[id(target)][1] == value else value
        # A copy: the value is changed while it is fitted into the target, but later calls compare with the original.
        self._taken[id(target)] = (target, copy.copy(value))
        _FILL[type(target)](self, target, value)
        return target

    def _record(self, target: object, value: object) -> object:
        """An object with fields; a value of another kind replaces the target."""
        from flowstone.state.classes import form_of  # imported here: most states have no such objects

        form = form_of(type(target))
        if form is None or id(target) in self._taken or not form.changes(target):
            return value
        self._taken[id(target)] = (target, value)
        own = form.fields(target)
        form.fill(target, {name: self.fit(own.get(name), item) for name, item in form.fields(value).items()})
        return target

    def _dict(self, target: dict[object, object], value: dict[object, object]) -> None:
        fitted = {key: self.fit(target.get(key), item) for key, item in value.items()}
        target.clear()
        target.update(fitted)

    def _list(self, target: list[object], value: list[object]) -> None:
        pairs = itertools.zip_longest(target[: len(value)], value)
        target[:] = [self.fit(old, new) for old, new in pairs]

    def _set(self, target: set[object], value: set[object]) -> None:
        target.clear()
        target.update(value)

    def _counter(self, target: Counter[object], value: Counter[object]) -> None:
        target.clear()
        for key, count in value.items():
            target[key] = count

    def _bytearray(self, target: bytearray, value: bytearray) -> None:
        target[:] = value


_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, tuple)
_FILL: Mapping[type, Callable[..., None]] = {
    dict: Fitting._dict,
    OrderedDict: Fitting._dict,
    list: Fitting._list,
    set: Fitting._set,
    Counter: Fitting._counter,
    bytearray: Fitting._bytearray,
}
