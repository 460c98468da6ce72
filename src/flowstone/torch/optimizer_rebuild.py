"""Restores optimizers: groups and slots (values for a parameter) get the stored values, without a step or a cast."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from operator import is_
from typing import cast

import torch

from flowstone.errors import StateError
from flowstone.format import objects
from flowstone.format.inner_objects import StoredGroup
from flowstone.format.objects import ProviderRecord, TensorRef
from flowstone.state.constants import resolve_constants
from flowstone.state.loading import RestorePass
from flowstone.state.names import Place
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import describe_node, refers_to_tensors, without_tensors
from flowstone.state.records import MISSING, RestorePhase, Shard, TensorSpec
from flowstone.torch import missing_entries, tensors
from flowstone.torch.flat import FlatSlice
from flowstone.torch.inner_optimizers import Core, parts_of
from flowstone.torch.models import StateModels
from flowstone.torch.optimizer_view import NOT_OPTIONS, OptimizerView, ParameterMember
from flowstone.torch.shards import is_dtensor
from flowstone.torch.slot_columns import SlotColumns
from flowstone.torch.state_dict_objects import StateDictOptimizer
from flowstone.torch.tensor_subclasses import find_tensor_provider

Built = Callable[[], object]


class Rebuild:
    """The state that an optimizer will have: the value of each slot and setting."""

    def __init__(self, loading: RestorePass, optimizer: Core, view: OptimizerView, place: Place) -> None:
        self.loading = loading
        self.optimizer = optimizer
        self.view = view
        self.place = place
        self.slots: dict[str, dict[object, Built]] = {}  # path of a parameter -> its slots
        self.kept: dict[str, set[object]] = {}  # path of a parameter -> slots that are read into existing tensors
        self.options: dict[int, dict[str, Built]] = {}  # index of a group -> its settings
        self.shared: Built = dict
        self.extra: Built = dict
        self._removed: dict[int, Sequence[str]] = {}  # index of a group -> settings to be removed from a state dict
        self._keeps_all = False  # whether every slot is read into its existing tensor
        self._on_device: dict[str, bool] = {}  # path -> whether scalar slots are on the parameter's device
        self._flat: dict[tuple[int, object], torch.Tensor] = {}  # (id of the parameter, slot) -> new flat tensor
        self._agreed: dict[tuple[int, object], tuple[str, object]] = {}  # (id of the parameter, slot) -> listed value

    @cached_property
    def _by_path(self) -> dict[str, ParameterMember]:
        return {member.home.path: member for member in self.view.members()}

    @cached_property
    def _by_owner(self) -> dict[int, list[ParameterMember]]:
        by_owner: dict[int, list[ParameterMember]] = {}
        for member in self.view.members():
            by_owner.setdefault(id(member.owner), []).append(member)
        return by_owner

    def _find(self, *paths: str) -> ParameterMember | None:
        """The member at the first of `paths` that exists; a tied parameter has several paths."""
        for path in paths:
            member = self._by_path.get(self.loading.state_scan.part(StateModels).parameters.first(path))
            if member is not None:
                return member
        return None

    def match_groups(self, stored: list[StoredGroup]) -> None:
        """Find for each stored group the optimizer's group with the same members (parameters), in any order. Groups of
        which only some members are on this rank come last.
        """
        rename = self.loading.stored.rename
        if [list(map(rename, group.params)) for group in stored] == list(map(list, self.view.paths)):
            for i, group in enumerate(stored):  # usually the groups are in the same order
                self._request_options(i, group.options)
            return
        waiting: dict[frozenset[str], list[int]] = {}
        for i, paths in enumerate(self.view.paths):
            waiting.setdefault(frozenset(paths), []).append(i)
        parts: list[tuple[int, StoredGroup, dict[str, ParameterMember | None]]] = []
        for i, group in enumerate(stored):
            members = {path: self._find(path, old) for old in group.params for path in self._moved(old)}
            key = frozenset(path if member is None else member.home.path for path, member in members.items())
            if waiting.get(key):
                self._request_options(waiting[key].pop(0), group.options)
            else:
                parts.append((i, group, members))
        self._match_parts(parts, sorted(i for left in waiting.values() for i in left))

    def _moved(self, path: str) -> Sequence[str]:
        """The names that a stored parameter has in the state; several if layout rules have divided it."""
        stored = self.loading.stored
        return stored.moved(path) or (stored.rename(path),)

    def _match_parts(
        self, stored: list[tuple[int, StoredGroup, dict[str, ParameterMember | None]]], waiting: list[int]
    ) -> None:
        """Find for each remaining stored group the optimizer's group that consists of its members on this rank.
        Members that are on no rank, and groups without a counterpart, become differences.
        """
        for i, group, members in stored:
            here = {member.home.path for member in members.values() if member is not None}
            alike = [j for j in waiting if set(self.view.paths[j]) == here]
            if not alike:
                self._differ(i, "unexpected", "no group of these members", _group(group.params))
                continue
            mine = i if i in alike else alike[0]
            waiting.remove(mine)
            self._request_options(mine, group.options)
            for path in [path for path, member in members.items() if member is None]:
                name = f"{self.place.name}.param_groups.{i}.{path}"
                self.loading.add_difference("unexpected", name, "no such parameter", "a parameter of the group")
        for i in waiting:
            self._differ(i, "missing", _group(self.view.paths[i]), "no group of these members")

    def _differ(self, i: int, kind: str, expected: str, actual: str) -> None:
        name = f"{self.place.name}.param_groups.{i}"
        self.loading.add_difference("missing" if kind == "missing" else "unexpected", name, expected, actual)

    def _request_options(self, i: int, options: Mapping[object, object]) -> None:
        """Take all settings of group `i` from the checkpoint. A setting's tensor that fits is read in place."""
        place = self.place.child("param_groups").child(i)
        on_device = bool(options.get("capturable")) or bool(options.get("fused"))
        self._on_device.update(dict.fromkeys(self.view.paths[i], on_device))
        new_values = NewValues(self.loading, partial(self._option_device, i, on_device), RestorePhase.OPTIMIZERS)
        chosen = self.options[i] = {}
        for key, node in options.items():
            if type(key) is not str or key in NOT_OPTIONS:
                continue
            current = self.view.options[i].get(key)
            if isinstance(node, TensorRef) and isinstance(current, torch.Tensor) and self._fits(current, node):
                self._into(current, node, place.child(key), None)
                chosen[key] = _constant(current)
            else:
                new_values.request(node, place.child(key), self.view.options[i].get(key, MISSING))
                chosen[key] = _building(new_values, node, place)
        absent = sorted(str(key) for key in self.view.options[i] if key not in chosen)
        if absent and missing_entries.note_options(self.loading, self.optimizer, absent, place):
            self._removed[i] = absent

    def _option_device(self, i: int, on_device: bool, _: TensorSpec) -> torch.device | str:
        members = self.view.groups[i]
        return members[0].parameter.device if members and on_device else "cpu"

    def _fits(self, tensor: torch.Tensor, ref: TensorRef) -> bool:
        stored = self.loading.stored.tensors.get(self.loading.stored.rename(ref.name))
        return stored == TensorSpec(tensors.dtype_of(tensor), tuple(tensor.shape))

    def _into(self, tensor: torch.Tensor, ref: TensorRef, place: Place, within: Shard | FlatSlice | None) -> None:
        name = self.loading.stored.rename(ref.name)
        self.loading.request_tensor(tensor, ref, place.called(name, place.key), within=within)

    def request_same_slots(self, slots: SlotColumns) -> None:
        """Request that all slots are read into their existing tensors: the optimizer has exactly the stored slots."""
        names, keys, values = slots
        self.loading.request_tensors(self.place, keys, names, values)
        self._keeps_all = True

    def request_slots(self, listed: Mapping[str, Mapping[object, object]], named: Iterable[str]) -> None:
        """Request the stored slots: `listed` ones, and those with the tensor names `named`. Slots that the optimizer
        has are read in place, others into new memory.
        """
        if self.place.rank is None:
            self._request_named_slots(listed, named)
        self._request_listed_slots(listed)

    def _request_named_slots(self, listed: Mapping[str, Mapping[object, object]], named: Iterable[str]) -> None:
        """Request slots that the checkpoint identifies only by the names of their tensors."""
        stored = self.loading.stored
        prefix = f"{self.place.name}.state."
        known = {stored.rename(name) for slots in listed.values() for name in _names_in(slots)}
        names: list[str] = []
        keys: list[tuple[str, str]] = []
        values: list[torch.Tensor] = []
        before, member = "", None
        for name in [name for name in named if name not in known]:
            head, _, slot = name.rpartition(".")
            if head != before:  # the slots of one parameter follow each other
                path, before = head[len(prefix) :], head
                member = self._find(path, stored.rename(path))
                kept = set() if member is None else self.kept.setdefault(member.home.path, set())
            if member is None or not member.here:
                continue  # another rank requests the slot; if no rank does, it is reported as unexpected
            current = member.slots.get(slot)
            if type(current) in tensors.DENSE_TYPES and member.home.held is None:
                names.append(name)
                keys.append((member.home.path, slot))
                values.append(current)  # type: ignore[arg-type]
                kept.add(slot)
            else:
                self._request_slot(member, slot, name, stored.tensors[name])
        self.loading.request_tensors(self.place, keys, names, values)

    def _request_slot(self, member: ParameterMember, slot: object, name: str, stored: TensorSpec) -> None:
        """Request a tensor slot: into the optimizer's tensor if it exists, otherwise into a new tensor."""
        place = self.place.called(name, (member.home.path, slot))
        parameter, held = member.parameter, member.home.held
        current = member.slots.get(slot)
        entry = find_tensor_provider(current)
        if entry is not None:
            self.loading.add_difference("kind", name, f"'{entry.kind}'", "a tensor")
            return
        if not isinstance(current, torch.Tensor):
            if type(held) is FlatSlice and not self._follows(member, slot, stored) and math.prod(stored.shape) != 1:
                self.loading.add_difference("shape", name, f"{held.shape}, or a single number", str(stored.shape))
                return
            current = self._new(member, slot, stored)
            self.loading.count_new((current.to_local() if is_dtensor(current) else current).nbytes)  # type: ignore[attr-defined]
        mine = cast("torch.Tensor", member.part_of(current))
        if held is not None and mine.shape == parameter.shape:
            self.loading.request_tensor(mine, MISSING, place, within=held)
        else:
            self.loading.walk(mine, place, MISSING)
        self.slots.setdefault(member.home.path, {})[slot] = _constant(current)

    def _new(self, member: ParameterMember, slot: object, stored: TensorSpec) -> torch.Tensor:
        """A new tensor for a slot. If the slot has the parameter's shape, the tensor gets the parameter's strides."""
        parameter, held = member.parameter, member.home.held
        if is_dtensor(parameter) and stored.shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=tensors.torch_dtype(stored.dtype), requires_grad=False)
        if type(held) is FlatSlice:
            same = self._follows(member, slot, stored)
        else:
            same = stored.shape == tuple(parameter.shape if held is None else held.shape)
        device = self._device(member, slot, stored)
        if member.flat is not None:
            anew = self._flat.get((id(member.owner), slot))
            if anew is None:  # all members of a flat parameter share one new tensor; its padding is zero
                anew = tensors.empty(stored.dtype, member.flat.shape if same else stored.shape, device=device).zero_()
                self._flat[id(member.owner), slot] = anew
            return anew
        shape = tuple(parameter.shape) if same else stored.shape
        return tensors.empty(stored.dtype, shape, device=device, strides=_strides_like(parameter) if same else None)

    def _follows(self, member: ParameterMember, slot: object, stored: TensorSpec) -> bool:
        """Whether a slot has the parameter's shape. If the parameter is a scalar, other members of its flat parameter
        decide.
        """
        held = cast("FlatSlice", member.home.held)
        if held.shape:
            return stored.shape == held.shape
        for other in self._by_owner[id(member.owner)]:
            theirs = self.loading.stored.tensors.get(f"{self.place.name}.state.{other.home.path}.{slot}")
            if theirs is not None and other.home.held is not None and other.home.held.shape:
                return theirs.shape == other.home.held.shape
        return slot != "step" and stored.shape == ()

    def _device(self, member: ParameterMember, slot: object, stored: TensorSpec) -> torch.device | str:
        """The device of a new slot: the parameter's; the CPU for step counters, unless a kernel reads them (as in
        torch).
        """
        counter = slot == "step" or (stored.shape == () and member.parameter.dim() > 0)
        if counter and not self._on_device.get(member.home.path, False):
            return "cpu"
        return member.parameter.device

    def _request_listed_slots(self, listed: Mapping[str, Mapping[object, object]]) -> None:
        """Request the listed slots: numbers, None, nested containers, and tensors that names do not identify."""
        stored = self.loading.stored
        new_values: dict[str, NewValues] = {}
        before: dict[tuple[str, object], object] = {}
        pairs = [(path, moved, slots) for path, slots in listed.items() for moved in self._moved(path)]
        for path, moved, slots in pairs:
            member = self._find(moved, path)
            if member is None:
                name = f"{self.place.name}.state.{path}"
                self.loading.add_difference("unexpected", name, "no such parameter", f"{len(slots)} slots")
                continue
            key = member.home.path
            anew = new_values.setdefault(key, NewValues(self.loading, partial(self._device, member, None)))
            for named, node in slots.items():
                slot = resolve_constants(named, self.place.name)
                place = self.place.child("state").child(path).child(slot)
                if not self._is_one(before.setdefault((key, slot), node), node, place):
                    continue
                if isinstance(node, TensorRef) and node.kind == "tensor":
                    name = stored.rename(node.name)
                    if name in stored.tensors:
                        self._request_slot(member, slot, name, stored.tensors[name])
                        continue
                if type(member.home.held) is FlatSlice and refers_to_tensors(node):
                    self.loading.add_difference(
                        "kind", place.name, "no tensors, as only a part is on this rank", describe_node(node)
                    )
                    continue
                current = member.slots.get(slot)
                if isinstance(node, ProviderRecord) and current is not None:
                    self.loading.walk(current, place, node)
                    self.slots.setdefault(key, {})[slot] = _constant(current)
                    continue
                if self._agrees(member, slot, node, place):
                    anew.request(node, place)
                    self.slots.setdefault(key, {})[slot] = _building(anew, node, place)

    def _is_one(self, first: object, node: object, place: Place) -> bool:
        """Whether a listed value is the first one for its slot. A slot has several if layout rules join parameters.
        Adds a difference if these values are not equal.
        """
        if first is node:
            return True
        mine, other = (objects.encode(without_tensors(value), place.name) for value in (first, node))
        if mine != other or refers_to_tensors(node):
            self.loading.add_difference(
                "kind", place.name, "the same value as in the slots that rules join with it", "another value"
            )
        return False

    def _agrees(self, member: ParameterMember, slot: object, node: object, place: Place) -> bool:
        """Whether to restore, for this member, a slot whose value is listed in the stored object: True if the member's
        state is on this rank. But members of a flat parameter share their slots, so only one of them gets True. Adds a
        difference if the values that are listed for these members are not equal.
        """
        if member.span is None:
            return member.here
        first, agreed = self._agreed.setdefault((id(member.owner), slot), (place.name, node))
        mine, theirs = (objects.encode(without_tensors(value), place.name) for value in (node, agreed))
        if mine != theirs:
            self.loading.add_difference(
                "kind", place.name, f"as in '{first}', of the same flat parameter", "another value"
            )
        return first == place.name

    def note_missing_slots(self) -> None:
        """Add notes to the load's report about slots of a state dict that the checkpoint lacks. Must be called when all
        stored slots are requested.
        """
        if not isinstance(self.optimizer, StateDictOptimizer):
            return
        absent: dict[str, dict[object, object]] = {}
        for member in self.view.members():
            path = member.home.path
            restored = self.kept.get(path, set()) | self.slots.get(path, {}).keys()
            absent[path] = {slot: value for slot, value in member.slots.items() if slot not in restored}
        missing_entries.note_slots(
            self.loading, self.optimizer, {path: of for path, of in absent.items() if of}, self.place
        )

    def request_rest(self, shared: object, extra: object) -> None:
        """Request state that belongs to no parameter, and entries that a subclass adds."""
        new_values = NewValues(self.loading, phase=RestorePhase.OPTIMIZERS)
        inside = self.place.child("state")
        new_values.request(shared, inside)
        new_values.request(extra, self.place, self.view.extra)
        self.shared = _building(new_values, shared, inside)
        self.extra = _building(new_values, extra, self.place)

    def apply(self) -> None:
        """Set the optimizer's full state. Calls load_state_dict() only if a subclass overrides it, or if it has hooks.
        """
        if _loads_itself(self.view.state_owner):
            self._hand_over()
            return
        state_owner = self.view.state_owner
        state = cast("dict[object, dict[object, object]]", state_owner.state)
        for members in () if self._is_as_it_was(state) else self._by_owner.values():
            owner, built = members[0].owner, self._built(members)
            if not any(member.here for member in members):
                continue
            if not built:
                state.pop(owner, None)
                continue
            current = state.setdefault(owner, {})
            for slot in [slot for slot in current if slot not in built]:
                del current[slot]
            current.update(built)
        for key in self.view.shared:
            state.pop(key, None)
        state.update(cast("dict[object, dict[object, object]]", self.shared()))
        self._apply_options(state_owner)
        if not self._keeps_all:
            self._convert(state_owner)

    def _convert(self, state_owner: Core) -> None:
        """Call __setstate__(), as torch's own load_state_dict() does at its end. It converts state of earlier releases,
        such as a `step` that is an int. It does not get the slots of parameters without any tensor slot.
        """
        for part in parts_of(state_owner):
            state = part.state
            try:
                tensorless = {key for key, slots in state.items() if isinstance(slots, dict) and not any(
                    isinstance(slot, torch.Tensor) for slot in slots.values())}
                filled = defaultdict(dict, {key: state[key] for key in state if key not in tensorless})
                part.__setstate__({"state": filled, "param_groups": part.param_groups})
                state.update(filled)
            except Exception as error:
                raise StateError(
                    f"cannot restore '{self.place.name}'",
                    found=f"__setstate__() of {type(part).__qualname__} raised {type(error).__name__}: {error}",
                    next="load a checkpoint of this class of optimizer; the optimizer's tensors already have the "
                    "loaded values",
                ) from error
            finally:
                part.state = state

    def _is_as_it_was(self, state: Mapping[object, object]) -> bool:
        """Whether the optimizer's dictionaries have all slots already, so that nothing must be set."""
        if not self._keeps_all or self.view.whole_slots is None:
            return False
        owners = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        return all(map(is_, map(state.get, owners), self.view.whole_slots))

    def _apply_options(self, *optimizers: Core) -> None:
        """Set the groups' settings, in the optimizer and in the inner optimizer that does its work."""
        for i, options in self.options.items():
            built = {key: make() for key, make in options.items()}
            for optimizer in {id(core): core for core in (self.optimizer, *optimizers)}.values():
                optimizer.param_groups[i].update(built)
                for key in self._removed.get(i, ()):
                    optimizer.param_groups[i].pop(key, None)

    def _built(self, members: Sequence[ParameterMember]) -> dict[object, object]:
        """The slots that a parameter will have. `members`: the parameter itself, or those in a flat one."""
        built: dict[object, object] = {}
        for member in members:
            if self._keeps_all:
                built.update(member.slots)
            slots_kept = self.kept.get(member.home.path)
            if slots_kept:
                built.update((slot, value) for slot, value in member.slots.items() if slot in slots_kept)
            built.update((slot, make()) for slot, make in self.slots.get(member.home.path, {}).items())
        return built

    def _hand_over(self) -> None:
        """Call load_state_dict() with the stored state_dict(), in the current order of parameters."""
        state: dict[object, object] = {}
        groups: list[dict[str, object]] = []
        state_owner, number = self.view.state_owner, 0
        for i, group in enumerate(state_owner.param_groups):
            packed: dict[str, object] = dict(self.view.options[i])
            packed.update({key: make() for key, make in self.options.get(i, {}).items()})
            names = group.get("param_names")
            if names is not None:
                packed["param_names"] = list(names)
            packed["params"] = list(range(number, number + len(group["params"])))
            groups.append(packed)
            for parameter in group["params"]:
                built = self._built(self._by_owner.get(id(parameter), ()))
                if built:
                    state[number] = built
                number += 1
        state.update(cast("dict[object, object]", self.shared()))
        tree = {"state": state, "param_groups": groups, **cast("dict[str, object]", self.extra())}
        try:
            state_owner.load_state_dict(tree)
        except Exception as error:
            raise StateError(
                f"cannot restore '{self.place.name}'",
                found=f"load_state_dict() raised {type(error).__name__}: {error}",
                next="fix that load_state_dict(); the optimizer's tensors are already restored",
            ) from error
        if not _overrides_load(state_owner):
            self._undo_casts(state)
        if state_owner is not self.optimizer:
            self._apply_options()

    def _undo_casts(self, given: Mapping[object, object]) -> None:
        """Set slots again that torch's own load_state_dict() has cast to the parameter's dtype."""
        state_owner = self.view.state_owner
        owned = [parameter for group in state_owner.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(owned):
            current = state_owner.state.get(parameter, {})
            for slot, value in cast("dict[object, object]", given.get(number, {})).items():
                held = current.get(slot)
                if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) and held.dtype != value.dtype:
                    current[slot] = value


def _loads_itself(optimizer: Core) -> bool:
    """Whether load_state_dict() does more than torch's own."""
    hooked = any(vars(part).get(name) for part in parts_of(optimizer) for name in _LOAD_HOOKS)
    return hooked or _overrides_load(optimizer)


def _overrides_load(optimizer: Core) -> bool:
    return any(
        type(part).load_state_dict is not torch.optim.Optimizer.load_state_dict or "load_state_dict" in vars(part)
        for part in parts_of(optimizer)
    )


_LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def _strides_like(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The strides that torch's zeros_like(parameter) would choose. None for a subclass other than nn.Parameter."""
    # They are the parameter's own strides if it is dense, whatever the order of its dimensions in memory.
    if type(parameter) not in tensors.DENSE_TYPES:
        return None
    return torch.empty_like(parameter, device="meta", requires_grad=False).stride()


def _names_in(node: object) -> list[str]:
    if isinstance(node, TensorRef):
        return [node.name]
    if isinstance(node, ProviderRecord):
        return [part.name for part in node.parts.values()]
    if isinstance(node, dict):
        return [name for item in node.values() for name in _names_in(item)]
    return [name for item in node for name in _names_in(item)] if isinstance(node, (list, tuple)) else []


def _constant(value: object) -> Built:
    return lambda: value


def _building(new_values: NewValues, node: object, place: Place) -> Built:
    return lambda: new_values.build(node, place.name)


def _group(paths: Sequence[str]) -> str:
    """The members of a group, as text for a message."""
    return f"a group of {len(paths)}: {missing_entries.listing(paths)}"
