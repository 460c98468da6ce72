"""Constants of torch and numpy that a checkpoint stores by name, as values and in keys."""

from __future__ import annotations

import enum
import re
from typing import cast

import numpy as np
import torch

from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format import objects
from flowstone.format.objects import Named
from flowstone.state.names import Place

_PYTHONS = frozenset({"datetime", "decimal", "fractions", "pathlib", "uuid", "zoneinfo"})
_TORCH = (torch.dtype, torch.layout, torch.memory_format)


def named(value: object, place: Place | None = None) -> Named | None:
    """Return what is stored for a constant (a dtype, a device, an enumeration member); None for any other value.

    place  of the value in the state that is saved; named in the warning about a class that a load may not know
    """
    if isinstance(value, _TORCH):
        return Named(f"torch.{type(value).__name__}", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Named("torch.device", str(value))
    if type(value) is torch.Size:
        return Named("torch.Size", ",".join(map(str, value)))
    if isinstance(value, np.dtype) and value.kind in "biufc" and value.isnative:
        return Named("numpy.dtype", value.name)
    if isinstance(value, enum.Enum) or type(value).__module__.partition(".")[0] in _PYTHONS:
        from flowstone.state import named_values  # imported here: most states have none

        return named_values.named(value, place)
    return None


def value_of(constant: Named, path: str) -> object:
    """The constant of that name, in this torch and numpy.

    raises  UnsupportedFormatError if they have none, DamagedError for a text that cannot be such a name
    """
    kind, text = constant.kind, constant.text
    reason: Exception | None = None
    if kind in ("torch.dtype", "torch.layout", "torch.memory_format"):
        value = getattr(torch, text, None)
        if isinstance(value, getattr(torch, kind.removeprefix("torch."))):
            return value
    elif kind == "torch.device" and re.fullmatch(r"[a-z]+(:[0-9]{1,9})?", text):
        try:
            return torch.device(text)
        except RuntimeError as error:
            reason = error  # a device type that this torch does not know
    elif kind == "torch.Size":
        if not re.fullmatch(r"([0-9]{1,18}(,[0-9]{1,18})*)?", text):
            raise DamagedError(f"the object '{path}' is not a torch.Size", found=text, next="run `flowstone verify`")
        return torch.Size(int(n) for n in text.split(",") if n)
    elif kind == "numpy.dtype" and re.fullmatch(r"[a-z]+[0-9]*", text):
        try:
            return np.dtype(text)
        except TypeError as error:
            reason = error  # from a later numpy, or another machine
    elif kind not in ("torch.device", "numpy.dtype"):
        from flowstone.state import named_values

        if named_values.is_known(kind):
            return named_values.value_of(constant, path)
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
    constant = named(key, place)
    if constant is not None:
        return constant
    if type(key) is frozenset:
        return frozenset(stored_key(part, place) for part in key)
    objects.encode(key, f"{place.name} key {key!r:.40}")
    return key


def constant_free(value: object, path: str) -> object:
    """A key, a leaf or a set, with constants of this torch and numpy in place of their names."""
    if isinstance(value, Named):
        return value_of(value, path)
    if type(value) in (set, frozenset, tuple):
        return type(value)(constant_free(part, path) for part in cast("set[object]", value))  # type: ignore[call-arg]
    return value
