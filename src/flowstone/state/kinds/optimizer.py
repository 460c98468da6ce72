"""Optimizers, and objects around some: slots under their parameters' names, groups by their members.

`optimizer_view.py` defines the stored object, and reads both sides; `optimizer_rebuild.py` restores an optimizer.
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
from flowstone.state.flat import Range
from flowstone.state.inner import Core, guards_of, is_optimizer, parts_of
from flowstone.state.kinds.stateful import Stateful
from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import Place
from flowstone.state.nodes import kind_of, refers_to_tensors
from flowstone.state.optimizer_kind import mismatch
from flowstone.state.optimizer_view import Member, OptimizerView, base_at, core_at, view_of
from flowstone.state.providers import served_tensor
from flowstone.state.records import MISSING, Phase
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.shards import is_dtensor
from flowstone.state.sink import Role
from flowstone.state.slot_columns import SlotColumns, implicit
from flowstone.state.tensors import DENSE_TYPES


class Optimizer(Stateful):
    """One of torch's optimizers, or a wrapper or container of some that has a state_dict().

    One whose state_dict() has a different form is saved like any other object with a state_dict().
    """

    bases = (torch.optim.Optimizer,)

    def recognises(self, value: object) -> bool:
        return isinstance(value, self.bases) or (super().recognises(value) and is_optimizer(value))

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        guards = guards_of(value)
        scan.guards |= {id(one): one for one in guards}
        scan.unguarded += [] if guards else [place.name]
        return True

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> object:
        core = core_at(value, place)
        if core is None:
            return super().describe(value, place, saving, role)
        node, base = _describe(core, place, saving), base_at(value, core, place)
        if base is not None:
            node["base"] = _describe(base, place.child("base"), saving)
        return node

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
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
                f"give load() the kind of object that was saved as {place.path}: it has another optimizer inside, "
                "which a state_dict() does not show"
            )
        return None

    def takes_state(self, value: object) -> bool:
        return not isinstance(value, self.bases)


def _describe(optimizer: Core, place: Place, saving: Saving) -> MergePoint:
    """Enter an optimizer's tensors. Returns its object, as `optimizer_view` defines it."""
    view = view_of(optimizer, saving.parameters, place)
    inside = place.child("state")
    guarded = {id(one) for one in saving.scan.optimizers}
    slots = _Slots(saving, inside, lazy=all(id(one) in guarded for one in parts_of(optimizer)))
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
    with saving.inside("marked"):
        groups = Groups(
            {
                "params": list(paths),
                "options": saving.walk(dict(options), options_place.child(i)),
            }
            for i, (paths, options) in enumerate(zip(view.paths, view.options, strict=True))
        )
        extra = saving.walk(dict(view.extra), place)
    with saving.inside("refused"):
        shared = saving.walk(dict(view.shared), inside)
    return MergePoint({"param_groups": groups, "state": state, "shared": shared, "extra": extra})


class _Slots:
    """Enters slots, parameter by parameter; those identified by names, many at a time."""

    def __init__(self, saving: Saving, inside: Place, *, lazy: bool) -> None:
        """`lazy`: they change only in steps that wait at the fence."""
        self._saving, self._inside = saving, inside
        self._role = Role.STEPPED if lazy else Role.OTHER
        self._keys: list[object] = []
        self._names: list[str] = []
        self._values: list[torch.Tensor] = []

    def describe_whole(self, columns: SlotColumns) -> None:
        """Enter the slots of whole parameters."""
        names, keys, values = columns
        self._saving.sink.enter_all(self._inside, keys, names, values, roles=[self._role] * len(names))

    def describe(self, member: Member) -> dict[object, object]:
        """Enter a parameter's slots. Returns those that must be listed."""
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
                    continue  # the rank that has the parameter lists it: a load leaves this one unchanged
                self.enter()
                plain = stored_key(slot, inside)
                inner = inside.child(path).child(plain)
                role = Role.OTHER if served_tensor(value) is None else self._role
                with self._saving.inside("refused"):
                    node = self._saving.walk(value, inner, role)
                if type(held) is Range and refers_to_tensors(node):
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
            elif type(held) is Range and mine.numel() != 1:
                raise _no_match(name)
            else:
                self._names.append(name)
                self._keys.append(key)
                self._values.append(value)  # type: ignore[arg-type]
            if inside.rank is not None:
                # Names do not identify slots for another rank that takes this per-rank entry.
                listed[slot] = TensorRef(name, "tensor")
        return listed

    def enter(self) -> None:
        """Enter the collected slots; call it before entering others, so that pieces stay in the state's order."""
        roles = [self._role] * len(self._names)
        self._saving.sink.enter_all(self._inside, self._keys, self._names, self._values, roles=roles)
        self._keys, self._names, self._values = [], [], []


def _no_match(name: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"slot '{name}' does not match this rank's shard",
        expected="a tensor as long as the shard, a single number, or values without tensors",
        next="save it as an entry of its own, in fs.PerRank",
    )


def _restore(optimizer: Core, node: object, place: Place, loading: Loading) -> None:
    """Request an optimizer's tensors, existing ones in place; plan to set its slots and settings."""
    if node is MISSING:
        loading.differ("missing", place.name, "an optimizer", "nothing of that name")
        return
    stored = stored_optimizer(node)
    if stored is None and not state_dicts.is_optimizers(node):
        loading.differ("kind", place.name, "an optimizer", kind_of(node))
        return
    view = view_of(optimizer, loading.parameters, place)
    if stored is None:
        stored = state_dicts.translate(loading, node, view, place)
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
        loading.differ("kind", place.name, *kinds)
        loading.remedies.append(
            f"use the kind of optimizer that was saved, or leave {place.name!r} out of the state to start it afresh"
        )
        return
    from flowstone.state.optimizer_rebuild import Rebuild  # imported here: what only saves needs it not

    rebuild = Rebuild(loading, optimizer, view, place)
    rebuild.match_groups(stored.groups)
    if same is not None:
        rebuild.want_same_slots(same)
    else:
        rebuild.want_slots(stored.listed, named)
        rebuild.note_missing_slots()
    rebuild.want_rest(stored.shared, stored.extra)
    loading.later(Phase.OPTIMIZERS, rebuild.apply)


def _same_slots(view: OptimizerView, listed: Mapping[str, object], named: Collection[str], place: Place) -> (
    SlotColumns | None
):
    """All slots, if the stored ones are exactly those of the optimizer, as in a job that resumes.

    listed  stored slots that no name identifies; `named`: the names of all others
    """
    columns = view.columns(f"{place.name}.state") if place.rank is None and not listed else None
    if columns is None or len(columns.names) != len(named) or set(columns.names) != set(named):
        return None
    return columns
