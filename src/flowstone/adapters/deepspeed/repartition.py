"""What ZeRO has partitioned among ranks, for another number of them: each rank reads what becomes its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowstone.adapters.deepspeed.partitions import Flat, Part, Shapes, of_a_run, of_each
from flowstone.adapters.deepspeed.values import decoded
from flowstone.checkpoint import Checkpoint
from flowstone.errors import DamagedError, StateError
from flowstone.format.assemble import assemble, tensor_names
from flowstone.format.objects import TensorRef
from flowstone.stage.fresh import live_values

_STATE = "optimizer_state_dict"
_OF_PARTITIONS = frozenset({
    "base_optimizer_state", "single_partition_of_fp32_groups", _STATE, "fp32_flat_groups", "param_slice_mappings",
    "group_paddings", "param_alignment_paddings", "partition_count",
})
"""Entries of an optimizer's state that are of one rank among so many."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Where a part is stored: of which rank, and of which of its flat tensors."""

    rank: int
    flat: int
    part: Part


@dataclass(frozen=True, slots=True)
class _Copy:
    """Elements of a stored flat tensor, and where they go in this rank's."""

    rank: int
    flat: int
    source: int
    target: int
    elements: int


class SavedPartitions:
    """An optimizer's state as a checkpoint holds it: the partition of each rank, of which parts are read.

    states  of each rank, what its file has under `optimizer_state_dict`: stored objects
    shapes  the parameters of each flat tensor

    raises  DamagedError  the files of the ranks contradict each other
            StateError    they were saved in a form that has no parts
    """

    def __init__(self, checkpoint: Checkpoint, states: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes]) -> None:
        self._checkpoint, self._states, self._shapes = checkpoint, states, shapes
        self._has_parts = _STATE in states[0]  # of each parameter: stage 3
        base = states[0][_STATE if self._has_parts else "base_optimizer_state"]
        if not isinstance(base, dict):
            raise StateError(
                f"{checkpoint.path} was saved with elastic_checkpoint", next="load it on as many ranks as have saved it"
            )
        self._groups: list[dict[str, Any]] = base["param_groups"]
        self._runs: dict[str, list[_Run]] = {}
        for number, group in enumerate(shapes):
            low = 0
            for rank in range(len(states)):
                elements = self._elements(self._slots(rank, number)[""])
                parts = self._parts(group, number, rank, low, low + elements)
                for part in parts:
                    self._runs.setdefault(part.name, []).append(_Run(rank, number, part))
                low += elements

    def of(self, flats: Sequence[Flat], paddings: object) -> dict[str, Any]:
        """What DeepSpeed loads on a rank that has these flat tensors.

        paddings  of this engine, where it has such

        raises    StateError    the engine has other parameters, or groups
                  DamagedError  stored bytes are not what was written
        """
        self._check(flats)
        slots = [self._cut(flat) for flat in flats]
        order = sorted(range(len(flats)), key=lambda number: flats[number].group)  # stable: as torch numbers them
        members: list[list[int]] = [[] for _ in self._groups]
        for identifier, number in enumerate(order):
            members[flats[number].group].append(identifier)
        masters = [found.pop("") for found in slots]
        base = {
            "state": {identifier: slots[number] for identifier, number in enumerate(order)},
            "param_groups": [
                {**self._value({key: value for key, value in group.items() if key != "params"}), "params": own}
                for group, own in zip(self._groups, members, strict=True)
            ],
        }
        found = self._value({key: one for key, one in self._states[0].items() if key not in _OF_PARTITIONS})
        if self._has_parts:
            return {**found, _STATE: base, "fp32_flat_groups": masters}
        given = {} if paddings is None else {"param_alignment_paddings": paddings}
        return {
            **found, "base_optimizer_state": base, "single_partition_of_fp32_groups": masters,
            "group_paddings": [0] * len(masters), **given,
        }

    def _slots(self, rank: int, flat: int) -> dict[str, Any]:
        """What is stored of a flat tensor on a rank: its master weights under "", and the optimizer's slots."""
        state = self._states[rank]
        try:
            base = state[_STATE if self._has_parts else "base_optimizer_state"]
            masters = state["fp32_flat_groups" if self._has_parts else "single_partition_of_fp32_groups"]
            return {"": masters[flat], **base["state"].get(flat, {})}
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._contradiction(f"rank {rank} has no flat tensor {flat}") from error

    def _elements(self, master: object) -> int:
        shape = self._checkpoint.tensors[master.name].shape if isinstance(master, TensorRef) else ()
        if len(shape) != 1:
            raise self._contradiction("master weights are no flat tensor")
        return shape[0]

    def _parts(self, group: Shapes, number: int, rank: int, low: int, high: int) -> tuple[Part, ...]:
        if self._has_parts:
            parts, elements = of_each(group, rank, len(self._states))
            if elements != high - low:
                raise self._contradiction(f"rank {rank} has {high - low} elements of a group, and not {elements}")
            return parts
        paddings = self._states[0].get("param_alignment_paddings")
        return of_a_run(group, [0] * len(group) if paddings is None else paddings[number], low, high)

    def _check(self, flats: Sequence[Flat]) -> None:
        """Whether each group has the parameters that it was saved with."""
        owners = {member: number for number, group in enumerate(self._groups) for member in group["params"]}
        saved = {
            name: (owners[number], shape) for number, group in enumerate(self._shapes) for name, shape in group.items()
        }
        ours = {name: (flat.group, shape) for flat in flats for name, shape in flat.shapes.items()}
        differing = [name for name in {**saved, **ours} if saved.get(name) != ours.get(name)]
        if differing:
            name = differing[0]
            raise StateError(
                f"the optimizer of this engine is not the one that {self._checkpoint.path} was saved with: "
                f"{len(differing)} parameters differ, {name!r:.200} first",
                saved=_told(saved.get(name)), here=_told(ours.get(name)),
                next="load it into an engine with the same parameters in the same groups",
            )

    def _cut(self, flat: Flat) -> dict[str, Any]:
        """The slots of one of this rank's flat tensors."""
        copies = self._copies(flat)
        sources = list(dict.fromkeys((one.rank, one.flat) for one in copies))
        if not sources:  # padding alone: what is no part of a parameter is that of the group's first
            first = next(iter(flat.shapes))
            sources = [(run.rank, run.flat) for run in self._runs.get(first, ())[:1]]
        if not sources:
            raise self._contradiction(f"they hold nothing of {flat.shapes.keys()}")
        stored = {source: self._slots(*source) for source in sources}
        found: dict[str, Any] = {}
        for slot, node in stored[sources[0]].items():
            if isinstance(node, TensorRef) and self._checkpoint.tensors[node.name].shape:
                made = _zeros(self._checkpoint, node, flat.elements)
                for one in copies:
                    self._read(made, stored[one.rank, one.flat].get(slot), one)
                found[slot] = made
            else:
                found[slot] = self._same(slot, [slots.get(slot) for slots in stored.values()])
        return found

    def _copies(self, flat: Flat) -> list[_Copy]:
        """What to read for a flat tensor; what lies side by side in both is one."""
        copies: list[_Copy] = []
        for part in flat.parts:
            held = 0
            for run in self._runs.get(part.name, ()):
                first = max(part.first, run.part.first)
                count = min(part.first + part.elements, run.part.first + run.part.elements) - first
                if count <= 0:
                    continue
                held += count
                source, target = run.part.begin + first - run.part.first, part.begin + first - part.first
                last = copies[-1] if copies else None
                if last and (last.rank, last.flat, last.source + last.elements, last.target + last.elements) == (
                    run.rank, run.flat, source, target
                ):
                    copies[-1] = _Copy(last.rank, last.flat, last.source, last.target, last.elements + count)
                else:
                    copies.append(_Copy(run.rank, run.flat, source, target, count))
            if held != part.elements:
                raise self._contradiction(f"they hold {held} of {part.elements} elements of {part.name!r:.200}")
        return copies

    def _read(self, into: torch.Tensor, node: object, one: _Copy) -> None:
        shape = self._checkpoint.tensors[node.name].shape if isinstance(node, TensorRef) else ()
        if not isinstance(node, TensorRef) or len(shape) != 1 or shape[0] < one.source + one.elements:
            raise self._contradiction(f"a slot of rank {one.rank} is no flat tensor of its partition")
        part = self._checkpoint.read(node.name, slice(one.source, one.source + one.elements))
        into[one.target : one.target + one.elements] = part

    def _same(self, slot: str, nodes: Sequence[object]) -> object:
        """A value that is not of single elements, a count of steps: which is the same in all partitions."""
        values = [self._value(node) for node in nodes]
        if any(not _equal(value, values[0]) for value in values):
            raise self._contradiction(f"{slot!r:.60} differs between them")
        return values[0]

    def _value(self, node: Any) -> Any:
        return stored_value(self._checkpoint, node)

    def _contradiction(self, what: str) -> DamagedError:
        return DamagedError(
            f"the partitions in {self._checkpoint.path} contradict each other: {what}",
            next="load it on as many ranks as have saved it, or load another tag",
        )


def stored_value(checkpoint: Checkpoint, node: Any) -> Any:
    """A stored object as DeepSpeed had it, with all of its tensors."""
    tensors = {name: checkpoint.read(name) for name in tensor_names((), "", node)}
    return decoded(assemble("", node, tensors, by_name=False, live=live_values()))


def frozen_fragment(
    checkpoint: Checkpoint, fragments: Sequence[TensorRef], shape: Sequence[int], rank: int, ranks: int
) -> torch.Tensor:
    """This rank's part, padded, of a parameter that is not trained, which stage 3 partitions too.

    fragments  of each rank that has saved, its part
    """
    elements = math.prod(shape)
    (ours, length), saved = of_each({"": tuple(shape)}, rank, ranks), -(-elements // len(fragments))
    made = _zeros(checkpoint, fragments[0], length)
    for part in ours:
        for number, fragment in enumerate(fragments):
            first = max(part.first, number * saved)
            last = min(part.first + part.elements, (number + 1) * saved)
            if first < last:
                stored = checkpoint.read(fragment.name, slice(first - number * saved, last - number * saved))
                made[first - part.first : last - part.first] = stored
    return made


def _zeros(checkpoint: Checkpoint, like: TensorRef, elements: int) -> torch.Tensor:
    return torch.zeros(elements, dtype=getattr(torch, checkpoint.tensors[like.name].dtype))


def _equal(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other)
    return bool(value == other)


def _told(one: tuple[int, tuple[int, ...]] | None) -> str:
    return "absent" if one is None else f"in group {one[0]}, shape {one[1]}"
