"""Slots of whole parameters, with few calls for thousands: their names and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast, overload

import torch

from flowstone.state.tensors import DENSE_TYPES


class SlotColumns(NamedTuple):
    """Slots, parameter by parameter.

    names   full names
    keys    path and slot of each: the keys that lead to it
    values  parallel
    """

    names: list[str]
    keys: Sequence[object]
    values: list[torch.Tensor]


def slot_columns(
    name: str, paths: Iterable[str], slots: Sequence[Mapping[object, object]]
) -> SlotColumns | None:
    """The slots of all members of an optimizer; None if one must be handled by itself: not a dense tensor, or not
    identified by its name.

    name   prefix of the slots: `<optimizer>.state`
    paths  of the members; `slots` of each

    450 parameters of AdamW: 0.4 ms, where looking at each slot takes 1.0.
    """
    suffixes_of: dict[tuple[object, ...], list[str]] = {}
    names: list[str] = []
    values: list[object] = []
    above = f"{name}."
    for path, own in zip(paths, slots, strict=True):
        keys = tuple(own)
        suffixes = suffixes_of.get(keys)
        if suffixes is None:
            if not all(map(implicit, keys)):
                return None
            suffixes = suffixes_of[keys] = [f".{key}" for key in keys]
        base = above + path
        names += [base + suffix for suffix in suffixes]
        values += own.values()
    if not DENSE_TYPES.issuperset(map(type, values)):
        return None
    return SlotColumns(names, _SlotKeys(names, len(above)), cast("list[torch.Tensor]", values))


def implicit(key: object) -> bool:
    """Whether a tensor's name alone identifies the slot."""
    return type(key) is str and "." not in key


class _SlotKeys(Sequence[object]):
    """The keys of slots, computed from their names: only error messages need them."""

    def __init__(self, names: Sequence[str], skipped: int) -> None:
        self._names, self._skipped = names, skipped

    @overload
    def __getitem__(self, position: int) -> object: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[object]: ...
    def __getitem__(self, position: int | slice) -> object:
        if isinstance(position, slice):
            return _SlotKeys(self._names[position], self._skipped)
        path, _, slot = self._names[position][self._skipped :].rpartition(".")
        return path, slot

    def __len__(self) -> int:
        return len(self._names)
