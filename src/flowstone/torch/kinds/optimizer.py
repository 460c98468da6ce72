"""Optimizers, and objects that contain optimizers. Slots, an optimizer's values for a parameter, are stored under the
parameter's name. Each group is stored with a list of its parameters.

`optimizer_view.py` defines the stored form, and reads it from an optimizer and from a checkpoint;
`optimizer_rebuild.py` restores an optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import cast

import torch

from flowstone.errors import UnsupportedStateError
from flowstone.format.inner_objects import stored_optimizer
from flowstone.format.merge_points import Groups, MergePoint
from flowstone.format.objects import TensorRef
from flowstone.state import state_dicts
from flowstone.state.constants import stored_key
from flowstone.state.kinds.stateful import StatefulKind
from flowstone.state.loading import Replacement, RestorePass
from flowstone.state.names import Place
from flowstone.state.nodes import describe_node, refers_to_tensors
from flowstone.state.records import MISSING, RestorePhase
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole
from flowstone.torch.flat import FlatSlice
from flowstone.torch.inner_optimizers import Core, is_optimizer, optimizers_to_fence, parts_of
from flowstone.torch.models import StateModels
from flowstone.torch.optimizer_kind import mismatch
from flowstone.torch.optimizer_view import OptimizerView, ParameterMember, base_at, core_at, view_of
from flowstone.torch.shards import is_dtensor
from flowstone.torch.slot_columns import SlotColumns, implicit
from flowstone.torch.tensor_subclasses import find_tensor_provider
from flowstone.torch.tensors import DENSE_TYPES


class OptimizerKind(StatefulKind):
    """A torch optimizer, or a wrapper or container of optimizers that has a state_dict().

    If the state_dict() does not have torch's form, the optimizer is saved like any object with a state_dict().
    """

    bases = (torch.optim.Optimizer,)

    def recognises(self, value: object) -> bool:
        return isinstance(value, self.bases) or (super().recognises(value) and is_optimizer(value))

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        scan.add_optimizer(place.name, optimizers_to_fence(value))
        return True

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> object:
        core = core_at(value, place)
        if core is None:
            return super().describe(value, place, saving, role)
        node, base = _describe(core, place, saving), base_at(value, core, place)
        if base is not None:
            node["base"] = _describe(base, place.child("base"), saving)
        return node

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> Replacement | None:
        core = core_at(value, place)
        wraps = not isinstance(value, self.bases)
        if core is None or (wraps and stored_optimizer(node) is None):
            return super().restore(value, node, place, loading)
        _restore(core, node, place, loading)
        base = base_at(value, core, place)
        inner = node.get("base", MISSING) if isinstance(node, dict) else MISSING
        if base is not None and node is not MISSING:
            _restore(base, inner, place.child("base"), loading)
        elif inner is not MISSING:
            loading.remedies.append(
                f"give load() the kind of object that was saved as {place.path}: that object has another optimizer "
                "inside, which a state_dict() does not show",
            )
        return None

    def takes_state(self, value: object) -> bool:
        return not isinstance(value, self.bases)


def _describe(optimizer: Core, place: Place, saving: DescribePass) -> MergePoint:
    """Add an optimizer's tensors to the save. Returns the stored form of the optimizer, which `optimizer_view.py`
    defines.
    """
    view = view_of(optimizer, saving.scan.part(StateModels).parameters, place)
    inside = place.child("state")
    guarded = set(map(id, saving.scan.optimizers))
    slots = _Slots(saving, inside, lazy=all(id(part) in guarded for part in parts_of(optimizer)))
    state = MergePoint()
    columns = view.columns(inside.name) if place.rank is None else None
    if columns is not None:
        slots.describe_whole(columns)
    else:
        for member in view.members():
            listed = slots.describe(member)
            if listed:
                state[member.home.path] = listed
        slots.enter()
    options_place = place.child("param_groups")
    with saving.inner_objects_as("marked"):
        groups = Groups(
            {
                "params": list(paths),
                "options": saving.walk(dict(options), options_place.child(i)),
            }
            for i, (paths, options) in enumerate(zip(view.paths, view.options, strict=True))
        )
        extra = saving.walk(dict(view.extra), place)
    with saving.inner_objects_as("refused"):
        shared = saving.walk(dict(view.shared), inside)
    return MergePoint({"param_groups": groups, "state": state, "shared": shared, "extra": extra})


class _Slots:
    """Adds slots (state tensors of a parameter) to a save, parameter by parameter. Slots that are identified by their
    names need not be listed in the optimizer's stored form; they are collected and added together.
    """

    def __init__(self, saving: DescribePass, inside: Place, *, lazy: bool) -> None:
        """`lazy`: the slots change only in steps that wait for captures."""
        self._saving, self._inside = saving, inside
        self._role = TensorRole.STEPPED if lazy else TensorRole.OTHER
        self._keys: list[object] = []
        self._names: list[str] = []
        self._values: list[torch.Tensor] = []

    def describe_whole(self, columns: SlotColumns) -> None:
        """Add the slots of an optimizer of which all parameters are full parameters."""
        names, keys, values = columns
        self._saving.sink.enter_all(self._inside, keys, names, values, roles=[self._role] * len(names))

    def describe(self, member: ParameterMember) -> dict[object, object]:
        """Add a parameter's slots. Returns the slots that must be listed in the optimizer's stored form."""
        listed: dict[object, object] = {}
        inside, (path, held) = self._inside, member.home
        base = f"{inside.name}.{path}."
        for slot, value in member.slots.items():
            if type(value) not in DENSE_TYPES and implicit(slot) and is_dtensor(value):
                self.enter()
                self._saving.walk(value, inside.called(f"{base}{slot}", (path, slot)), self._role)
                continue
            if not implicit(slot) or type(value) not in DENSE_TYPES:
                if not member.here:
                    continue  # the rank that has the parameter lists the slot
                self.enter()
                plain = stored_key(slot, inside)
                inner = inside.child(path).child(plain)
                role = TensorRole.OTHER if find_tensor_provider(value) is None else self._role
                with self._saving.inner_objects_as("refused"):
                    node = self._saving.walk(value, inner, role)
                if type(held) is FlatSlice and refers_to_tensors(node):
                    raise _no_match(inner.name)
                listed[plain] = node
                continue
            name, key = base + cast("str", slot), (path, slot)
            mine = cast("torch.Tensor", value if member.span is None else member.part_of(value))
            if held is not None and mine.shape == member.parameter.shape:
                self.enter()
                self._saving.sink.enter(inside.called(name, key), mine, within=held, role=self._role)
            elif not member.here:
                continue
            elif type(held) is FlatSlice and mine.numel() != 1:
                raise _no_match(name)
            else:
                self._names.append(name)
                self._keys.append(key)
                self._values.append(value)  # type: ignore[arg-type]
            if inside.rank is not None:
                # If another rank loads this per-rank entry, names do not identify its slots, so the slots are listed.
                listed[slot] = TensorRef(name, "tensor")
        return listed

    def enter(self) -> None:
        """Add the collected slots. Must be called before any other slot is added, so that pieces stay in the state's
        order.
        """
        roles = [self._role] * len(self._names)
        self._saving.sink.enter_all(self._inside, self._keys, self._names, self._values, roles=roles)
        self._keys, self._names, self._values = [], [], []


def _no_match(name: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"the optimizer's value '{name}' does not match this rank's shard of the parameter",
        expected="a tensor as long as the shard, a single number, or values without tensors",
        next="save this value as an entry of its own in the state, in fs.PerRank",
    )


def _restore(optimizer: Core, node: object, place: Place, loading: RestorePass) -> None:
    """Request an optimizer's tensors: existing ones are read in place, others into new memory. Plan to set its slots
    and settings after the read.
    """
    if node is MISSING:
        loading.add_difference("missing", place.name, "an optimizer", "nothing of that name")
        return
    stored = stored_optimizer(node)
    if stored is None and not state_dicts.is_optimizer_state_dict(node):
        loading.add_difference("kind", place.name, "an optimizer", describe_node(node))
        return
    view = view_of(optimizer, loading.state_scan.part(StateModels).parameters, place)
    if stored is None:
        from flowstone.torch.state_dict_matching import translate  # imported here: few optimizers need it

        stored = translate(loading, node, view, place)
        if stored is None:
            return
    prefix = f"{place.name}.state."
    named = [name for name in loading.stored.tensors if name.startswith(prefix)]
    same = _same_slots(view, stored.listed, named, place)
    slots = set(chain.from_iterable(view.slots() if same is not None else stored.listed.values()))
    if same is None:
        slots.update(name.rpartition(".")[2] for name in named)
    kinds = mismatch(optimizer, view, stored, set(map(str, slots)))
    if kinds is not None:
        loading.add_difference("kind", place.name, *kinds)
        loading.remedies.append(
            f"use the kind of optimizer that was saved, or leave {place.name!r} out of the state to start it afresh"
        )
        return
    from flowstone.torch.optimizer_rebuild import Rebuild  # imported here: saves do not need it

    rebuild = Rebuild(loading, optimizer, view, place)
    rebuild.match_groups(stored.groups)
    if same is not None:
        rebuild.request_same_slots(same)
    else:
        rebuild.request_slots(stored.listed, named)
        rebuild.note_missing_slots()
    rebuild.request_rest(stored.shared, stored.extra)
    loading.defer(RestorePhase.OPTIMIZERS, rebuild.apply)


def _same_slots(view: OptimizerView, listed: Mapping[str, object], named: Collection[str], place: Place) -> (
    SlotColumns | None
):
    """All slots of the optimizer, if it has exactly the stored ones, as in a job that resumes; otherwise None.

    listed  the stored slots that are listed, because no name identifies them
    named   the names of all other stored slots
    """
    columns = view.columns(f"{place.name}.state") if place.rank is None and not listed else None
    if columns is None or len(columns.names) != len(named) or set(columns.names) != set(named):
        return None
    return columns
