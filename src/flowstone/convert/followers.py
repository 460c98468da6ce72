"""Optimizer state in a conversion by rules: it follows the parameters, as it does in a load.

The slots of a parameter are tensors, and are rearranged as the parameter is (`plan/rearrange.py`). Groups, and slots
that are no tensors, are objects: here they get the names that the parameters have after the rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from flowstone.config import MIB
from flowstone.convert.fetch import Fetcher, Wanted
from flowstone.convert.layout import Output
from flowstone.convert.source import Source
from flowstone.errors import MismatchError
from flowstone.format.objects import TensorRef
from flowstone.layout_rules import ConversionRule, LayoutRule, RuleSet
from flowstone.plan.rearrange import Followers, Origin, Tensors, rearranged
from flowstone.rules import STATE, Rename, Skip
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.stored import SourceTensor, StoredBox

_Node = dict[str, Any]
_Steps = Sequence[ConversionRule | RuleSet]


def optimizers(objects: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, _Node]]:
    """The optimizers in sections whose groups know their members by name, with the path of each."""
    for key, value in objects.items():
        if not isinstance(value, dict):
            continue
        if _is_optimizer(value):
            yield f"{prefix}{key}", value
        yield from optimizers(cast("Mapping[str, object]", value), f"{prefix}{key}.")


def _is_optimizer(value: _Node) -> bool:
    """Whether it has the form of FORMAT.md, in which no parameter is a number."""
    groups = value.get("param_groups")
    return isinstance(groups, list) and isinstance(value.get("state"), dict) and all(
        isinstance(group, dict) and isinstance(group.get("options"), dict) and isinstance(group.get("params"), list)
        and all(isinstance(path, str) for path in group["params"]) for group in groups
    )


class Follow:
    """What follows the parameters of a source as rules move these. Use with `with`: it may read the source.

    is_left_out  of names: an optimizer whose slots are all left out keeps its objects as they are
    """

    def __init__(self, source: Source, steps: _Steps, is_left_out: Callable[[str], bool]) -> None:
        self._source, self._steps, self._is_left_out = source, steps, is_left_out
        self._followed = {
            name for name, _ in optimizers(source.objects) if steps and not all(map(is_left_out, self._slots_of(name)))
        }
        self._fetcher: Fetcher | None = None
        self._read: dict[int, bytes] = {}

    def __enter__(self) -> Follow:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fetcher is not None:
            self._fetcher.close()

    @property
    def slots(self) -> Followers | None:
        """How tensors follow; None where the source has no optimizer whose slots have the names of parameters."""
        if not self._followed:
            return None
        names = set(self._followed)
        for rule in _allowing_nothing(self._steps):
            names |= {rule.apply(name) for name in names} if isinstance(rule, Rename) else set()
        return Followers(names.__contains__, self._equal)

    def objects(self, tensors: Tensors) -> Mapping[str, object]:
        """The source's objects, with each followed optimizer as the rules have its parameters.

        tensors  of the source, by every name that they have
        raises   MismatchError  a rule joins parameters of two groups, or values that differ, or names parameters of
                                an optimizer that each rank has of its own
        """
        found = self._source.objects
        self._check_per_rank(tensors)
        for name, node in optimizers(self._source.objects) if self._followed else ():
            if name in self._followed:
                found = _put(found, name.split("."), self._moved(name, node, tensors))
        return found

    def _slots_of(self, optimizer: str) -> list[str]:
        """The names of its slots; where it has none that is a tensor, that of its groups."""
        prefix = f"{optimizer}{STATE}"
        found = [one.name for one in self._source.tensors if one.name.startswith(prefix)]
        return found or [f"{optimizer}.param_groups"]

    def _check_per_rank(self, tensors: Tensors) -> None:
        of_ranks = [{section: one} for section, ranks in self._source.per_rank.items() for one in ranks]
        for name, node in (found for one in of_ranks for found in optimizers(one)):
            if not self._steps or self._is_left_out(name):
                continue
            for number, group in enumerate(node["param_groups"]):
                where = f"{name}.param_groups.{number}"
                if [*self._members_after(group["params"], tensors, where)] != group["params"]:
                    raise MismatchError(
                        f"{where} cannot follow its parameters: each rank has such an optimizer of its own",
                        next=f"leave it out with --skip {name!r}, or its parameters out of the rule",
                    )

    def _moved(self, name: str, node: _Node, tensors: Tensors) -> _Node:
        sources: dict[str, tuple[str, ...]] = {}
        groups = []
        for number, group in enumerate(node["param_groups"]):
            where = f"{name}.param_groups.{number}"
            made = self._members_after(group["params"], tensors, where)
            sources |= made
            groups.append({**group, "params": [*made]})
        state: dict[str, object] = {}
        for path, parts in sources.items():
            listed = [node["state"][part] for part in parts if part in node["state"]]
            if listed:
                state[path] = _joined(f"{name}.state.{path}", parts, listed)
        of_members = {part for parts in sources.values() for part in parts}
        state |= {path: slots for path, slots in node["state"].items() if path not in of_members}
        return {**node, "param_groups": groups, "state": state}

    def _members_after(self, paths: Sequence[str], tensors: Tensors, where: str) -> dict[str, tuple[str, ...]]:
        """The members of a group after the rules, and which ones each is made of."""
        table: dict[str, SourceTensor] = {}
        for number, path in enumerate(paths):
            known = tensors.get(path)
            shape, dtype = (known.shape, known.dtype) if known is not None else ((), DTYPES["uint8"])
            boxes = (StoredBox(Box.whole(shape), number, 0),) if 0 not in shape else ()
            table[path] = SourceTensor(path, dtype, shape, boxes)
        try:
            made = rearranged(table, _allowing_nothing(self._steps), Origin(where, is_lenient=True))
        except MismatchError as error:
            raise MismatchError(
                f"{where} cannot follow its parameters: {error.message}", found=error.facts.get("found", "nothing"),
                missing=error.facts.get("missing", "nothing"),
                next="leave the optimizer out with --skip 'OPTIMIZER.*', or its parameters out of the rule",
            ) from error
        return {
            path: tuple(dict.fromkeys(paths[box.file] for box in tensor.boxes if box.file is not None))
            or (tensor.name,) for path, tensor in made.items()
        }

    def _equal(self, one: SourceTensor, other: SourceTensor) -> bool:
        return one.boxes == other.boxes or self._bytes(one) == self._bytes(other)

    def _bytes(self, tensor: SourceTensor) -> bytes:
        """The content of a tensor, which is a single number."""
        if id(tensor) not in self._read:
            if self._fetcher is None:
                self._fetcher = Fetcher(self._source, 8 * MIB)
            memory = np.empty(tensor.bytes, np.uint8)
            self._fetcher.fetch([Wanted(Output(tensor.name, tensor, tensor.dtype), 0, tensor.bytes, memory)])
            self._read[id(tensor)] = memory.tobytes()
        return self._read[id(tensor)]


def _joined(name: str, parts: Sequence[str], listed: Sequence[dict[str, object]]) -> dict[str, object]:
    """The slots that are no tensors, of a parameter that is made of these; they have to be the same for all."""
    same = len(listed) == len(parts) and all(repr(one) == repr(listed[0]) for one in listed)
    if not same or (len(parts) > 1 and any(isinstance(value, TensorRef) for value in listed[0].values())):
        raise MismatchError(
            f"{name!r} would be made of slots that differ", found=", ".join(parts),
            expected="one value, as of parameters that train together",
            next="leave the optimizer out with --skip 'OPTIMIZER.*', or its parameters out of the rule",
        )
    return listed[0]


def _allowing_nothing(steps: _Steps) -> list[ConversionRule]:
    """The same rules, of which each may name nothing: a group has only some of the parameters."""
    flat = [rule for step in steps for rule in (step.rules if isinstance(step, RuleSet) else (step,))]
    return [
        dataclasses.replace(rule, required=False) if isinstance(rule, LayoutRule) else rule
        for rule in flat if not isinstance(rule, Skip)
    ]


def _put(objects: Mapping[str, object], keys: Sequence[str], value: object) -> Mapping[str, object]:
    """A copy of nested dicts with another value at a path."""
    if len(keys) == 1:
        return {**objects, keys[0]: value}
    return {**objects, keys[0]: _put(cast("Mapping[str, object]", objects[keys[0]]), keys[1:], value)}


__all__ = ["Follow", "optimizers"]
