"""Optimizer state in a conversion with rules: if a rule renames, splits or joins parameters, the optimizer's state of
these parameters is changed in the same way.

A slot is one value of the state of a parameter, such as exp_avg. Slots that are tensors are rearranged like their
parameter (`layouts/rearrange.py`). Groups and other slots are objects, in which this module replaces the parameters'
names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from flowstone.config import MIB
from flowstone.convert.fetch import Fetcher, FetchRequest
from flowstone.convert.layout import Output
from flowstone.convert.source import SourceCheckpoint
from flowstone.errors import MismatchError
from flowstone.format.objects import TensorRef
from flowstone.layouts.layout_rules import ConversionRule, LayoutRule, RuleSet
from flowstone.layouts.rearrange import Followers, Origin, Tensors, rearrange
from flowstone.rules.load_rules import STATE, Rename, Skip
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.stored import SourceTensor, StoredBox

_Node = dict[str, Any]
_Steps = Sequence[ConversionRule | RuleSet]


def optimizers(objects: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, _Node]]:
    """Each optimizer whose groups list their parameters by name, as (its path, its stored object)."""
    for key, value in objects.items():
        if not isinstance(value, dict):
            continue
        if _is_optimizer(value):
            yield f"{prefix}{key}", value
        yield from optimizers(cast("Mapping[str, object]", value), f"{prefix}{key}.")


def _is_optimizer(value: _Node) -> bool:
    """Whether a stored value has the form of an optimizer (docs/FORMAT.md) whose parameters are named, not numbered."""
    groups = value.get("param_groups")
    return isinstance(groups, list) and isinstance(value.get("state"), dict) and all(
        isinstance(group, dict) and isinstance(group.get("options"), dict) and isinstance(group.get("params"), list)
        and all(isinstance(path, str) for path in group["params"]) for group in groups
    )


class OptimizerMapping:
    """Applies the rules for parameters to a source's optimizer state. Use it in a `with` statement, as it may open the
    source's files.

    is_left_out  returns whether a name is skipped. If all slots of an optimizer are skipped, its objects stay unchanged
    """

    def __init__(self, source: SourceCheckpoint, steps: _Steps, is_left_out: Callable[[str], bool]) -> None:
        self._source, self._steps, self._is_left_out = source, steps, is_left_out
        self._followed = {
            name for name, _ in optimizers(source.objects) if steps and not all(map(is_left_out, self._slots_of(name)))
        }
        self._fetcher: Fetcher | None = None
        self._read: dict[int, bytes] = {}

    def __enter__(self) -> OptimizerMapping:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fetcher is not None:
            self._fetcher.close()

    @property
    def slots(self) -> Followers | None:
        """How slots that are tensors follow their parameters. None if the source has no optimizer whose slots have
        names of parameters.
        """
        if not self._followed:
            return None
        names = set(self._followed)
        for rule in _as_optional(self._steps):
            names |= {rule.apply(name) for name in names} if isinstance(rule, Rename) else set()
        return Followers(names.__contains__, self._equal)

    def objects(self, tensors: Tensors) -> Mapping[str, object]:
        """The source's objects, in which the rules were applied to each optimizer.

        tensors  the source's tensors, by all of their names
        raises   MismatchError  a rule joins parameters of two groups, or parameters whose optimizer state differs; or
                                a rule changes parameters of an optimizer that each rank has saved for itself
        """
        objects = self._source.objects
        self._check_per_rank(tensors)
        for name, node in optimizers(self._source.objects) if self._followed else ():
            if name in self._followed:
                objects = _with_value_at(objects, name.split("."), self._map_optimizer(name, node, tensors))
        return objects

    def _slots_of(self, optimizer: str) -> list[str]:
        """The names of the tensors in an optimizer's state; the name of its groups if there are no such tensors."""
        prefix = f"{optimizer}{STATE}"
        names = [tensor.name for tensor in self._source.tensors if tensor.name.startswith(prefix)]
        return names or [f"{optimizer}.param_groups"]

    def _check_per_rank(self, tensors: Tensors) -> None:
        of_ranks = [{section: value} for section, ranks in self._source.per_rank.items() for value in ranks]
        for name, node in (item for objects in of_ranks for item in optimizers(objects)):
            if not self._steps or self._is_left_out(name):
                continue
            for number, group in enumerate(node["param_groups"]):
                where = f"{name}.param_groups.{number}"
                if [*self._members_after_rules(group["params"], tensors, where)] != group["params"]:
                    raise MismatchError(
                        f"the rules rename or cut parameters of {where}, but this optimizer was saved by each rank "
                        "for itself",
                        next=f"leave the optimizer out with --skip {name!r}, or its parameters out of the rules",
                    )

    def _map_optimizer(self, name: str, node: _Node, tensors: Tensors) -> _Node:
        sources: dict[str, tuple[str, ...]] = {}
        groups = []
        for number, group in enumerate(node["param_groups"]):
            where = f"{name}.param_groups.{number}"
            made = self._members_after_rules(group["params"], tensors, where)
            sources |= made
            groups.append({**group, "params": [*made]})
        state: dict[str, object] = {}
        for path, parts in sources.items():
            listed = [node["state"][part] for part in parts if part in node["state"]]
            if listed:
                state[path] = _common_slots(f"{name}.state.{path}", parts, listed)
        of_members = {part for parts in sources.values() for part in parts}
        state |= {path: slots for path, slots in node["state"].items() if path not in of_members}
        return {**node, "param_groups": groups, "state": state}

    def _members_after_rules(self, paths: Sequence[str], tensors: Tensors, where: str) -> dict[str, tuple[str, ...]]:
        """The parameters of a group after the rules: new name -> the old parameters of which it is made."""
        table: dict[str, SourceTensor] = {}
        for number, path in enumerate(paths):
            tensor = tensors.get(path)
            shape, dtype = (tensor.shape, tensor.dtype) if tensor is not None else ((), DTYPES["uint8"])
            boxes = (StoredBox(Box.whole(shape), number, 0),) if 0 not in shape else ()
            table[path] = SourceTensor(path, dtype, shape, boxes)
        try:
            made = rearrange(table, _as_optional(self._steps), Origin(where, is_lenient=True))
        except MismatchError as error:
            raise MismatchError(
                f"the rules of the parameters do not fit {where}: {error.message}",
                found=error.facts.get("found", "nothing"), missing=error.facts.get("missing", "nothing"),
                next="leave the optimizer out with --skip 'OPTIMIZER.*', or its parameters out of the rule",
            ) from error
        return {
            path: tuple(dict.fromkeys(paths[box.file] for box in tensor.boxes if box.file is not None))
            or (tensor.name,) for path, tensor in made.items()
        }

    def _equal(self, a: SourceTensor, b: SourceTensor) -> bool:
        return a.boxes == b.boxes or self._bytes(a) == self._bytes(b)

    def _bytes(self, tensor: SourceTensor) -> bytes:
        """The content of a one-element tensor."""
        if id(tensor) not in self._read:
            if self._fetcher is None:
                self._fetcher = Fetcher(self._source, 8 * MIB)
            memory = np.empty(tensor.bytes, np.uint8)
            self._fetcher.fetch([FetchRequest(Output(tensor.name, tensor, tensor.dtype), 0, tensor.bytes, memory)])
            self._read[id(tensor)] = memory.tobytes()
        return self._read[id(tensor)]


def _common_slots(name: str, parts: Sequence[str], listed: Sequence[dict[str, object]]) -> dict[str, object]:
    """The slots, other than tensors, of a parameter that is made of `parts`. They must be equal for all parts."""
    same = len(listed) == len(parts) and all(repr(slots) == repr(listed[0]) for slots in listed)
    if not same or (len(parts) > 1 and any(isinstance(value, TensorRef) for value in listed[0].values())):
        raise MismatchError(
            f"a rule joins parameters into {name!r}, but the optimizer state of these parameters differs",
            found=", ".join(parts), expected="equal values, as for parameters that are trained together",
            next="leave the optimizer out with --skip 'OPTIMIZER.*', or its parameters out of the rule",
        )
    return listed[0]


def _as_optional(steps: _Steps) -> list[ConversionRule]:
    """The same rules, but each may match no parameter, as a group has only some of the parameters."""
    flat = [rule for step in steps for rule in (step.rules if isinstance(step, RuleSet) else (step,))]
    return [
        dataclasses.replace(rule, required=False) if isinstance(rule, LayoutRule) else rule
        for rule in flat if not isinstance(rule, Skip)
    ]


def _with_value_at(objects: Mapping[str, object], keys: Sequence[str], value: object) -> Mapping[str, object]:
    """A copy of nested dicts, in which the value at the path `keys` is replaced."""
    if len(keys) == 1:
        return {**objects, keys[0]: value}
    return {**objects, keys[0]: _with_value_at(cast("Mapping[str, object]", objects[keys[0]]), keys[1:], value)}


__all__ = ["OptimizerMapping", "optimizers"]
