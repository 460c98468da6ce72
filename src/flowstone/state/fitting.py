"""Fitting: put plain values into the existing containers that they replace."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping


class ContainerFitter:
    """Puts plain values into existing containers, so that other references to the containers see the change.

    A container may be at two places of the state. It can take only one value; if another value was saved for the second
    place, that place gets a new container.
    """

    def __init__(self) -> None:
        self._taken: dict[int, tuple[object, object]] = {}

    def fit(self, target: object, value: object) -> object:
        """Put `value` into the container `target`, and into the containers inside of it, as far as their types agree
        with those of the value. Returns the container, or the value where the types differ.
        """
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
        """Set the fields of the object `target` to those of `value`. If their types differ, returns `value` instead."""
        from flowstone.state.classes import form_of  # imported here: most states have no such objects

        form = form_of(type(target))
        if form is None or id(target) in self._taken or not form.is_mutable(target):
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
    dict: ContainerFitter._dict,
    OrderedDict: ContainerFitter._dict,
    list: ContainerFitter._list,
    set: ContainerFitter._set,
    Counter: ContainerFitter._counter,
    bytearray: ContainerFitter._bytearray,
}
