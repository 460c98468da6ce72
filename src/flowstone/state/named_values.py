"""Values of Python's standard library that a checkpoint stores as text: numbers, paths, times, members of
enumerations.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
import re
import uuid
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any

from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format.objects import NamedConstant
from flowstone.state.classes import CLASSES, ENUM, name_of
from flowstone.state.names import Place

_TEXT: Mapping[type, Callable[[Any], str]] = {
    decimal.Decimal: str,
    fractions.Fraction: str,
    uuid.UUID: str,
    datetime.date: datetime.date.isoformat,
    datetime.timedelta: lambda value: f"{value.days} {value.seconds} {value.microseconds}",
    datetime.timezone: lambda value: f"{value.utcoffset(None) // datetime.timedelta(microseconds=1)}",
    datetime.datetime: lambda value: _datetime_text(value),
    datetime.time: lambda value: _datetime_text(value),
    zoneinfo.ZoneInfo: lambda value: value.key or "",
    pathlib.PurePosixPath: str,
    pathlib.PureWindowsPath: str,
    pathlib.PosixPath: str,
    pathlib.WindowsPath: str,
}
_KINDS = {f"{own.__module__.partition('.')[0]}.{own.__qualname__}": own for own in _TEXT}
_NAMES = {own: kind for kind, own in _KINDS.items()}


def value_name(value: object, place: Place | None = None) -> NamedConstant | None:
    """The kind and the text that are stored for a value; None if this module cannot store it as text. `place`: where it
    is in the state, for a warning.
    """
    own = type(value)
    if isinstance(value, enum.Enum):
        member = value.name if value.name in own.__members__ else f"({value.value})"  # type: ignore[attr-defined]
        is_plain = type(value.name) is str and (member == value.name or type(value.value) is int)
        if is_plain and place is not None:
            CLASSES.warn_unknown(own, place)
        return NamedConstant(ENUM, f"{name_of(own)}.{member}") if is_plain else None
    if own not in _TEXT or (own is zoneinfo.ZoneInfo and not getattr(value, "key", None)):
        return None
    zone = getattr(value, "tzinfo", None)
    if zone is not None and value_name(zone) is None:
        return None
    return NamedConstant(_NAMES[own], _TEXT[own](value))


def is_known(kind: str) -> bool:
    """Whether this module can make values of kind `kind` from their stored text."""
    return kind == ENUM or kind in _KINDS


def named_value(constant: NamedConstant, path: str) -> object:
    """The value for which the kind and the text of `constant` are stored. `path`: the value's path, for errors.

    raises  UnsupportedFormatError if its class or time zone is unknown in this process, DamagedError for an invalid
            text
    """
    try:
        return _value_of(constant.kind, constant.text)
    except LookupError as error:
        raise UnsupportedFormatError(
            f"the object '{path}' is of an unknown enumeration or time zone", found=constant.text,
            next="register the enumeration with fs.register_class(), or load into a state that has a member of it; for "
            "a time zone, install the package tzdata",
        ) from error
    except (ValueError, ArithmeticError, TypeError, OSError) as error:
        raise DamagedError(
            f"the object '{path}' is not a valid {constant.kind}", found=constant.text[:80],
            next="run `flowstone verify`",
        ) from error


def _value_of(kind: str, text: str) -> object:
    """The value of kind `kind` that is stored as `text`. Raises LookupError for an unknown class or time zone, and
    Python's own errors for an invalid text.
    """
    if kind == ENUM:
        return _member(text)
    own = _KINDS[kind]
    if own in (pathlib.PosixPath, pathlib.WindowsPath) and own is not type(pathlib.Path()):
        own = pathlib.PurePosixPath if own is pathlib.PosixPath else pathlib.PureWindowsPath  # another system's path
    if own is datetime.timedelta:
        days, seconds, microseconds = map(int, text.split(" "))
        return datetime.timedelta(days, seconds, microseconds)
    if own is datetime.timezone:
        return datetime.timezone(datetime.timedelta(microseconds=int(text)))
    if own in (datetime.datetime, datetime.time):
        return _parse_datetime(own, text)
    if own is datetime.date:
        return datetime.date.fromisoformat(text)
    if own is fractions.Fraction and not re.fullmatch(r"-?\d{1,4000}(/\d{1,4000})?", text):
        raise ValueError("the text is not a fraction")
    return own(text)


def _datetime_text(value: datetime.datetime | datetime.time) -> str:
    """A time as text: ISO 8601 without a zone, the zone in brackets if there is one, and ` 1` if Python's `fold` is 1
    (nothing if it is 0). For example `2026-03-01T00:00:00 [zoneinfo.ZoneInfo UTC] 1`.
    """
    zone = None if value.tzinfo is None else value_name(value.tzinfo)
    where = "" if zone is None else f" [{zone.kind} {zone.text}]"
    return f"{value.replace(tzinfo=None, fold=0).isoformat()}{where}{' 1' * value.fold}"


def _parse_datetime(own: Any, text: str) -> object:
    match = re.fullmatch(r"(\S+)(?: \[(\S+) ([^\]]+)\])?( 1)?", text)
    if match is None or (match[2] and match[2] not in ("zoneinfo.ZoneInfo", "datetime.timezone")):
        raise ValueError("the text is not a date or time")
    zone: Any = _value_of(match[2], match[3]) if match[2] else None
    return own.fromisoformat(match[1]).replace(tzinfo=zone, fold=1 if match[4] else 0)


def _member(text: str) -> object:
    name, _, member = text.rpartition(".")
    own = CLASSES.find(name)
    if own is None:
        raise LookupError(name)
    if not isinstance(own, type) or not issubclass(own, enum.Enum):
        raise ValueError(f"{name} is not an enumeration")
    if re.fullmatch(r"\(-?\d{1,4000}\)", member):
        return own(int(member[1:-1]))
    return own.__members__[member]
