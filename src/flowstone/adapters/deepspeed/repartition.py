"""Divide ZeRO's state among another number of ranks. Each rank reads only the parts that it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowstone.adapters.deepspeed.partitions import FlatPart, FlatTensor, Shapes, parts_of_each_parameter, parts_of_run
from flowstone.adapters.deepspeed.values import decode_state
from flowstone.errors import DamagedError, StateError
from flowstone.format.assemble import assemble, tensor_names
from flowstone.format.objects import TensorRef
from flowstone.reading.checkpoint import Checkpoint
from flowstone.stage.allocation import live_values

_STATE = "optimizer_state_dict"
_OF_PARTITIONS = frozenset({
    "base_optimizer_state", "single_partition_of_fp32_groups", _STATE, "fp32_flat_groups", "param_slice_mappings",
    "group_paddings", "param_alignment_paddings", "partition_count",
})
"""Entries of an optimizer's state that depend on the number of ranks."""


@dataclass(frozen=True, slots=True)
class _StoredPart:
    """Where a part is stored: its rank, and the number of its flat tensor on that rank."""

    rank: int
    flat: int
    part: FlatPart


@dataclass(frozen=True, slots=True)
class _Copy:
    """A range of elements of a stored flat tensor, to be copied to the offset `target` of this rank's flat tensor."""

    rank: int
    flat: int
    source: int
    target: int
    elements: int


class SavedPartitions:
    """An optimizer's state in a checkpoint, as the partitions of all ranks that saved. Each rank reads the ranges that
    it needs.

    states  the `optimizer_state_dict` in each rank's file, as stored objects
    shapes  the parameters of each flat tensor

    raises  DamagedError  the files of the ranks contradict each other
            StateError    the state was saved in a form that cannot be divided again
    """

    def __init__(self, checkpoint: Checkpoint, states: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes]) -> None:
        self._checkpoint, self._states, self._shapes = checkpoint, states, shapes
        self._has_parts = _STATE in states[0]  # with stage 3, each parameter is cut separately
        base = states[0][_STATE if self._has_parts else "base_optimizer_state"]
        if not isinstance(base, dict):
            raise StateError(
                f"{checkpoint.path} was saved with elastic_checkpoint: it can be loaded only with the same "
                "number of ranks", next=f"load with as many ranks as saved it: {len(states)}",
            )
        self._groups: list[dict[str, Any]] = base["param_groups"]
        self._runs: dict[str, list[_StoredPart]] = {}
        for number, group in enumerate(shapes):
            low = 0
            for rank in range(len(states)):
                elements = self._elements(self._slots(rank, number)[""])
                parts = self._parts(group, number, rank, low, low + elements)
                for part in parts:
                    self._runs.setdefault(part.name, []).append(_StoredPart(rank, number, part))
                low += elements

    def state_for(self, flats: Sequence[FlatTensor], paddings: object) -> dict[str, Any]:
        """The state that DeepSpeed loads on a rank with these flat tensors.

        paddings  this engine's paddings, if it has any

        raises    StateError    the engine has other parameters or groups than the checkpoint
                  DamagedError  stored bytes do not match their digest
        """
        self._check(flats)
        slots = [self._cut(flat) for flat in flats]
        order = sorted(range(len(flats)), key=lambda number: flats[number].group)  # the sort is stable, like torch's
        members: list[list[int]] = [[] for _ in self._groups]
        for identifier, number in enumerate(order):
            members[flats[number].group].append(identifier)
        masters = [slot.pop("") for slot in slots]
        base = {
            "state": {identifier: slots[number] for identifier, number in enumerate(order)},
            "param_groups": [
                {**self._value({key: value for key, value in group.items() if key != "params"}), "params": own}
                for group, own in zip(self._groups, members, strict=True)
            ],
        }
        content = self._value({key: node for key, node in self._states[0].items() if key not in _OF_PARTITIONS})
        if self._has_parts:
            return {**content, _STATE: base, "fp32_flat_groups": masters}
        given = {} if paddings is None else {"param_alignment_paddings": paddings}
        return {
            **content, "base_optimizer_state": base, "single_partition_of_fp32_groups": masters,
            "group_paddings": [0] * len(masters), **given,
        }

    def _slots(self, rank: int, flat: int) -> dict[str, Any]:
        """The stored tensors of a flat tensor's state on a rank: the fp32 weights under "", and the optimizer's state,
        such as exp_avg.
        """
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
            raise self._contradiction("the fp32 master weights of a parameter group are not one flat tensor")
        return shape[0]

    def _parts(self, group: Shapes, number: int, rank: int, low: int, high: int) -> tuple[FlatPart, ...]:
        if self._has_parts:
            parts, elements = parts_of_each_parameter(group, rank, len(self._states))
            if elements != high - low:
                raise self._contradiction(
                    f"rank {rank} has {high - low} elements of a parameter group instead of {elements}"
                )
            return parts
        paddings = self._states[0].get("param_alignment_paddings")
        return parts_of_run(group, [0] * len(group) if paddings is None else paddings[number], low, high)

    def _check(self, flats: Sequence[FlatTensor]) -> None:
        """Raise StateError unless each group has the parameters with which it was saved."""
        owners = {member: number for number, group in enumerate(self._groups) for member in group["params"]}
        saved = {
            name: (owners[number], shape) for number, group in enumerate(self._shapes) for name, shape in group.items()
        }
        ours = {name: (flat.group, shape) for flat in flats for name, shape in flat.shapes.items()}
        differing = [name for name in {**saved, **ours} if saved.get(name) != ours.get(name)]
        if differing:
            name = differing[0]
            raise StateError(
                f"the optimizer of this engine differs from the optimizer in {self._checkpoint.path}: "
                f"{len(differing)} parameters differ, {name!r:.200} first",
                saved=_shown_parameter(saved.get(name)), here=_shown_parameter(ours.get(name)),
                next="load it into an engine with the same parameters in the same groups",
            )

    def _cut(self, flat: FlatTensor) -> dict[str, Any]:
        """The state for one of this rank's flat tensors, put together from the stored partitions."""
        copies = self._copies(flat)
        sources = list(dict.fromkeys((copy.rank, copy.flat) for copy in copies))
        if not sources:  # the flat tensor has only padding, so other values are taken from the group's first parameter
            first = next(iter(flat.shapes))
            sources = [(run.rank, run.flat) for run in self._runs.get(first, ())[:1]]
        if not sources:
            raise self._contradiction(f"no rank has elements of {', '.join(flat.shapes):.200}")
        stored = {source: self._slots(*source) for source in sources}
        result: dict[str, Any] = {}
        for slot, node in stored[sources[0]].items():
            if isinstance(node, TensorRef) and self._checkpoint.tensors[node.name].shape:
                made = _zeros(self._checkpoint, node, flat.elements)
                for copy in copies:
                    self._read(made, stored[copy.rank, copy.flat].get(slot), copy)
                result[slot] = made
            else:
                result[slot] = self._same(slot, [slots.get(slot) for slots in stored.values()])
        return result

    def _copies(self, flat: FlatTensor) -> list[_Copy]:
        """The copies that fill a flat tensor. Adjacent ranges are merged."""
        copies: list[_Copy] = []
        for part in flat.parts:
            count_found = 0
            for run in self._runs.get(part.name, ()):
                first = max(part.first, run.part.first)
                count = min(part.first + part.elements, run.part.first + run.part.elements) - first
                if count <= 0:
                    continue
                count_found += count
                source, target = run.part.begin + first - run.part.first, part.begin + first - part.first
                last = copies[-1] if copies else None
                if last and (last.rank, last.flat, last.source + last.elements, last.target + last.elements) == (
                    run.rank, run.flat, source, target
                ):
                    copies[-1] = _Copy(last.rank, last.flat, last.source, last.target, last.elements + count)
                else:
                    copies.append(_Copy(run.rank, run.flat, source, target, count))
            if count_found != part.elements:
                raise self._contradiction(
                    f"together they have {count_found} of the {part.elements} elements of {part.name!r:.200}"
                )
        return copies

    def _read(self, into: torch.Tensor, node: object, copy: _Copy) -> None:
        shape = self._checkpoint.tensors[node.name].shape if isinstance(node, TensorRef) else ()
        if not isinstance(node, TensorRef) or len(shape) != 1 or shape[0] < copy.source + copy.elements:
            raise self._contradiction(f"an optimizer tensor of rank {copy.rank} is not flat, or is too short")
        part = self._checkpoint.read(node.name, slice(copy.source, copy.source + copy.elements))
        into[copy.target : copy.target + copy.elements] = part

    def _same(self, slot: str, nodes: Sequence[object]) -> object:
        """A value other than a tensor, such as the step count. It must be equal in all partitions."""
        values = [self._value(node) for node in nodes]
        if any(not _equal(value, values[0]) for value in values):
            raise self._contradiction(f"the value {slot!r:.60} of the optimizer differs between ranks")
        return values[0]

    def _value(self, node: Any) -> Any:
        return stored_value(self._checkpoint, node)

    def _contradiction(self, reason: str) -> DamagedError:
        return DamagedError(
            f"the partitions in {self._checkpoint.path} contradict each other: {reason}",
            next="load it with as many ranks as saved it, or load another tag",
        )


def stored_value(checkpoint: Checkpoint, node: Any) -> Any:
    """A stored object as DeepSpeed expects it, with all its tensors."""
    tensors = {name: checkpoint.read(name) for name in tensor_names((), "", node)}
    return decode_state(assemble("", node, tensors, by_name=False, live=live_values()))


def frozen_fragment(
    checkpoint: Checkpoint, fragments: Sequence[TensorRef], shape: Sequence[int], rank: int, ranks: int
) -> torch.Tensor:
    """This rank's part, with padding, of a frozen parameter. Stage 3 partitions frozen parameters, too.

    fragments  the stored parts, of all ranks that saved
    """
    elements = math.prod(shape)
    (ours, length), saved = parts_of_each_parameter({"": tuple(shape)}, rank, ranks), -(-elements // len(fragments))
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


def _shown_parameter(owner: tuple[int, tuple[int, ...]] | None) -> str:
    return "absent" if owner is None else f"in group {owner[0]}, shape {owner[1]}"
