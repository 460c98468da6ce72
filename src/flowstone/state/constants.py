"""Constants of numpy and torch, such as dtypes and devices, which a checkpoint stores by name: as values, and in keys
of dicts.
"""

from __future__ import annotations

import enum
import re
from typing import cast

import numpy as np

from flowstone.errors import UnsupportedFormatError
from flowstone.format import objects
from flowstone.format.objects import NamedConstant
from flowstone.state.framework import FRAMEWORK
from flowstone.state.names import Place

_PYTHONS = frozenset({"datetime", "decimal", "fractions", "pathlib", "uuid", "zoneinfo"})


def constant_name(value: object, place: Place | None = None) -> NamedConstant | None:
    """The stored name of a constant (a dtype, a device, an enumeration member); None for any other value.

    place  the value's place in the state, for the warning about a class that a load may not know
    """
    constant = FRAMEWORK.constant_name(value)
    if constant is not None:
        return constant
    if isinstance(value, np.dtype) and value.kind in "biufc" and value.isnative:
        return NamedConstant("numpy.dtype", value.name)
    if isinstance(value, enum.Enum) or type(value).__module__.partition(".")[0] in _PYTHONS:
        from flowstone.state import named_values  # imported here: most states have none

        return named_values.value_name(value, place)
    return None


def constant_of(constant: NamedConstant, path: str) -> object:
    """The constant of torch or numpy with that name.

    raises  UnsupportedFormatError if the installed torch and numpy lack it, DamagedError for an invalid name
    """
    kind, text = constant.kind, constant.text
    reason: Exception | None = None
    if kind == "numpy.dtype":
        try:
            if re.fullmatch(r"[a-z]+[0-9]*", text):
                return np.dtype(text)
        except TypeError as error:
            reason = error  # the constant was stored by a later numpy, or on another kind of machine
    else:
        try:
            return FRAMEWORK.constant(constant, path)
        except LookupError as error:
            reason = cast("Exception | None", error.__cause__)
        from flowstone.state import named_values  # imported here: most states have none

        if named_values.is_known(kind):
            return named_values.named_value(constant, path)
    raise UnsupportedFormatError(
        f"the object '{path}' is a constant that this torch and numpy do not have",
        found=f"{kind} {text}",
        next="install the versions that saved it",
    ) from reason


def stored_key(key: object, place: Place) -> object:
    """A dict key or a set's member as a plain, hashable value."""
    if type(key) is str or type(key) is int:
        return key
    if type(key) is tuple:
        return tuple(stored_key(part, place) for part in key)
    constant = constant_name(key, place)
    if constant is not None:
        return constant
    if type(key) is frozenset:
        return frozenset(stored_key(part, place) for part in key)
    objects.encode(key, f"{place.name} key {key!r:.40}")
    return key


def resolve_constants(value: object, path: str) -> object:
    """`value` (a dict key, a plain value or a set) with constants of torch and numpy in place of their stored names."""
    if isinstance(value, NamedConstant):
        return constant_of(value, path)
    if type(value) in (set, frozenset, tuple):
        return type(value)(resolve_constants(part, path) for part in cast("set[object]", value))  # type: ignore[call-arg]
    return value
