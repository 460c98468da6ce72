"""Rebuild optimizers: slots and groups follow the checkpoint; without a dummy step, without a cast."""

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
from flowstone.format.objects import Provided, TensorRef
from flowstone.state import absence, tensors
from flowstone.state.constants import constant_free
from flowstone.state.flat import Range
from flowstone.state.inner import Core, parts_of
from flowstone.state.loading import Loading
from flowstone.state.names import Place
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import kind_of, refers_to_tensors, without_tensors
from flowstone.state.optimizer_view import NOT_OPTIONS, Member, OptimizerView
from flowstone.state.providers import served_tensor
from flowstone.state.records import MISSING, Phase, Shard, StoredTensor
from flowstone.state.shards import is_dtensor
from flowstone.state.slot_columns import SlotColumns
from flowstone.state.state_dict_objects import StateDictOptimizer

Built = Callable[[], object]


class Rebuild:
    """An optimizer's future state: the value of each slot and setting."""

    def __init__(self, loading: Loading, optimizer: Core, view: OptimizerView, place: Place) -> None:
        self.loading = loading
        self.optimizer = optimizer
        self.view = view
        self.place = place
        self.slots: dict[str, dict[object, Built]] = {}  # by path of the parameter
        self.kept: dict[str, set[object]] = {}  # by path: slots that are read into their own tensors
        self.options: dict[int, dict[str, Built]] = {}  # by index of the optimizer's group
        self.shared: Built = dict
        self.extra: Built = dict
        self._removed: dict[int, Sequence[str]] = {}  # by index: settings that a state dict loses
        self._keeps_all = False  # every slot stays the tensor that it is
        self._on_device: dict[str, bool] = {}  # by path: are scalar slots on the parameter's device
        self._flat: dict[tuple[int, object], torch.Tensor] = {}  # by owner and slot: new flat tensors
        self._agreed: dict[tuple[int, object], tuple[str, object]] = {}  # the same: listed values

    @cached_property
    def _by_path(self) -> dict[str, Member]:
        return {member.home.path: member for member in self.view.members()}

    @cached_property
    def _by_owner(self) -> dict[int, list[Member]]:
        by_owner: dict[int, list[Member]] = {}
        for member in self.view.members():
            by_owner.setdefault(id(member.owner), []).append(member)
        return by_owner

    def _find(self, *paths: str) -> Member | None:
        """The member at the first of `paths` that exists; a tied parameter has several paths."""
        for path in paths:
            member = self._by_path.get(self.loading.parameters.first(path))
            if member is not None:
                return member
        return None

    def match_groups(self, stored: list[StoredGroup]) -> None:
        """Pair groups that have the same members, in any order; then groups of which only some members are here."""
        rename = self.loading.stored.rename
        if [list(map(rename, group.params)) for group in stored] == list(map(list, self.view.paths)):
            for i, group in enumerate(stored):  # the usual case
                self._want_options(i, group.options)
            return
        waiting: dict[frozenset[str], list[int]] = {}
        for i, paths in enumerate(self.view.paths):
            waiting.setdefault(frozenset(paths), []).append(i)
        parts: list[tuple[int, StoredGroup, dict[str, Member | None]]] = []
        for i, group in enumerate(stored):
            found = {path: self._find(path, old) for old in group.params for path in self._moved(old)}
            key = frozenset(path if member is None else member.home.path for path, member in found.items())
            if waiting.get(key):
                self._want_options(waiting[key].pop(0), group.options)
            else:
                parts.append((i, group, found))
        self._match_parts(parts, sorted(i for left in waiting.values() for i in left))

    def _moved(self, path: str) -> Sequence[str]:
        """The present names of a stored parameter: several where rules have divided it."""
        stored = self.loading.stored
        return stored.moved(path) or (stored.rename(path),)

    def _match_parts(self, stored: list[tuple[int, StoredGroup, dict[str, Member | None]]], waiting: list[int]) -> None:
        """Pair groups by the stored members that are on this rank. Members that no other rank has are differences; so
        is each group without a partner.
        """
        for i, group, found in stored:
            here = {member.home.path for member in found.values() if member is not None}
            alike = [j for j in waiting if set(self.view.paths[j]) == here]
            if not alike:
                self._differ(i, "unexpected", "no group of these members", _group(group.params))
                continue
            mine = i if i in alike else alike[0]
            waiting.remove(mine)
            self._want_options(mine, group.options)
            for path in [path for path, member in found.items() if member is None]:
                name = f"{self.place.name}.param_groups.{i}.{path}"
                self.loading.differ("unexpected", name, "no such parameter", "a member of the group")
        for i in waiting:
            self._differ(i, "missing", _group(self.view.paths[i]), "no group of these members")

    def _differ(self, i: int, kind: str, expected: str, found: str) -> None:
        name = f"{self.place.name}.param_groups.{i}"
        self.loading.differ("missing" if kind == "missing" else "unexpected", name, expected, found)

    def _want_options(self, i: int, options: Mapping[object, object]) -> None:
        """Settings follow the checkpoint completely; a tensor that fits is kept and written into."""
        place = self.place.child("param_groups").child(i)
        on_device = bool(options.get("capturable")) or bool(options.get("fused"))
        self._on_device.update(dict.fromkeys(self.view.paths[i], on_device))
        new_values = NewValues(self.loading, partial(self._option_device, i, on_device), Phase.OPTIMIZERS)
        chosen = self.options[i] = {}
        for key, node in options.items():
            if type(key) is not str or key in NOT_OPTIONS:
                continue
            current = self.view.options[i].get(key)
            if isinstance(node, TensorRef) and isinstance(current, torch.Tensor) and self._fits(current, node):
                self._into(current, node, place.child(key), None)
                chosen[key] = _constant(current)
            else:
                new_values.want(node, place.child(key), self.view.options[i].get(key, MISSING))
                chosen[key] = _building(new_values, node, place)
        absent = sorted(str(key) for key in self.view.options[i] if key not in chosen)
        if absent and absence.note_options(self.loading, self.optimizer, absent, place):
            self._removed[i] = absent

    def _option_device(self, i: int, on_device: bool, _: StoredTensor) -> torch.device | str:
        members = self.view.groups[i]
        return members[0].parameter.device if members and on_device else "cpu"

    def _fits(self, tensor: torch.Tensor, ref: TensorRef) -> bool:
        stored = self.loading.stored
        found = stored.tensors.get(stored.rename(ref.name))
        return found == StoredTensor(tensors.dtype_of(tensor), tuple(tensor.shape))

    def _into(self, tensor: torch.Tensor, ref: TensorRef, place: Place, within: Shard | Range | None) -> None:
        name = self.loading.stored.rename(ref.name)
        self.loading.into_tensor(tensor, ref, place.called(name, place.key), within=within)

    def want_same_slots(self, slots: SlotColumns) -> None:
        """Request all slots in place: the stored ones are exactly those that the optimizer has."""
        names, keys, values = slots
        self.loading.into_tensors(self.place, keys, names, values)
        self._keeps_all = True

    def want_slots(self, listed: Mapping[str, Mapping[object, object]], named: Iterable[str]) -> None:
        """Request all stored slots, in place if the optimizer has them, else in new memory.

        named  names of stored slots, which say parameter and slot, unless those are among `listed`
        """
        if self.place.rank is None:
            self._want_named_slots(listed, named)
        self._want_listed_slots(listed)

    def _want_named_slots(self, listed: Mapping[str, Mapping[object, object]], named: Iterable[str]) -> None:
        """Request slots that are identified by their tensors' names alone."""
        stored = self.loading.stored
        prefix = f"{self.place.name}.state."
        known = {stored.rename(name) for slots in listed.values() for name in _names_in(slots)}
        names: list[str] = []
        keys: list[tuple[str, str]] = []
        values: list[torch.Tensor] = []
        before, member = "", None
        for name in [name for name in named if name not in known]:
            head, _, slot = name.rpartition(".")
            if head != before:  # a parameter's slots are consecutive
                path, before = head[len(prefix) :], head
                member = self._find(path, stored.rename(path))
                kept = set() if member is None else self.kept.setdefault(member.home.path, set())
            if member is None or not member.here:
                continue  # another rank requests it; if none does, it is reported as unexpected
            current = member.slots.get(slot)
            if type(current) in tensors.DENSE_TYPES and member.home.held is None:
                names.append(name)
                keys.append((member.home.path, slot))
                values.append(current)  # type: ignore[arg-type]
                kept.add(slot)
            else:
                self._want_slot(member, slot, name, stored.tensors[name])
        self.loading.into_tensors(self.place, keys, names, values)

    def _want_slot(self, member: Member, slot: object, name: str, stored: StoredTensor) -> None:
        """Request a tensor slot: into the optimizer's own tensor if it exists, else into a new one of the stored form.
        """
        place = self.place.called(name, (member.home.path, slot))
        parameter, held = member.parameter, member.home.held
        current = member.slots.get(slot)
        served = served_tensor(current)
        if served is not None:
            self.loading.differ("kind", name, f"'{served.kind}'", "a tensor")
            return
        if not isinstance(current, torch.Tensor):
            if type(held) is Range and not self._follows(member, slot, stored) and math.prod(stored.shape) != 1:
                self.loading.differ("shape", name, f"{held.shape}, or a single number", str(stored.shape))
                return
            current = self._new(member, slot, stored)
            self.loading.new_bytes += (current.to_local() if is_dtensor(current) else current).nbytes  # type: ignore[attr-defined]
        mine = cast("torch.Tensor", member.part_of(current))
        if held is not None and mine.shape == parameter.shape:
            self.loading.into_tensor(mine, MISSING, place, within=held)
        else:
            self.loading.walk(mine, place, MISSING)
        self.slots.setdefault(member.home.path, {})[slot] = _constant(current)

    def _new(self, member: Member, slot: object, stored: StoredTensor) -> torch.Tensor:
        """A new slot; with the parameter's layout if it has the parameter's shape."""
        parameter, held = member.parameter, member.home.held
        if is_dtensor(parameter) and stored.shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=tensors.torch_dtype(stored.dtype), requires_grad=False)
        if type(held) is Range:
            same = self._follows(member, slot, stored)
        else:
            same = stored.shape == tuple(parameter.shape if held is None else held.shape)
        device = self._device(member, slot, stored)
        if member.flat is not None:
            known = self._flat.get((id(member.owner), slot))
            if known is None:  # one for the whole flat parameter, zero in the padding
                known = tensors.empty(stored.dtype, member.flat.shape if same else stored.shape, device=device).zero_()
                self._flat[id(member.owner), slot] = known
            return known
        shape = tuple(parameter.shape) if same else stored.shape
        return tensors.empty(stored.dtype, shape, device=device, strides=_strides_like(parameter) if same else None)

    def _follows(self, member: Member, slot: object, stored: StoredTensor) -> bool:
        """Whether a slot has one element per element of the parameter. For a scalar, other members of its flat one
        decide.
        """
        held = cast("Range", member.home.held)
        if held.shape:
            return stored.shape == held.shape
        for other in self._by_owner[id(member.owner)]:
            theirs = self.loading.stored.tensors.get(f"{self.place.name}.state.{other.home.path}.{slot}")
            if theirs is not None and other.home.held is not None and other.home.held.shape:
                return theirs.shape == other.home.held.shape
        return slot != "step" and stored.shape == ()

    def _device(self, member: Member, slot: object, stored: StoredTensor) -> torch.device | str:
        """The parameter's device; but the CPU for step counters, unless a kernel reads them (as in torch)."""
        counter = slot == "step" or (stored.shape == () and member.parameter.dim() > 0)
        if counter and not self._on_device.get(member.home.path, False):
            return "cpu"
        return member.parameter.device

    def _want_listed_slots(self, listed: Mapping[str, Mapping[object, object]]) -> None:
        """Request slots that are numbers, None, nested containers; and tensors whose names do not identify them."""
        stored = self.loading.stored
        new_values: dict[str, NewValues] = {}
        before: dict[tuple[str, object], object] = {}
        pairs = [(path, moved, slots) for path, slots in listed.items() for moved in self._moved(path)]
        for path, moved, slots in pairs:
            member = self._find(moved, path)
            if member is None:
                name = f"{self.place.name}.state.{path}"
                self.loading.differ("unexpected", name, "no such parameter", f"{len(slots)} slots")
                continue
            key = member.home.path
            anew = new_values.setdefault(key, NewValues(self.loading, partial(self._device, member, None)))
            for named, node in slots.items():
                slot = constant_free(named, self.place.name)
                place = self.place.child("state").child(path).child(slot)
                if not self._is_one(before.setdefault((key, slot), node), node, place):
                    continue
                if isinstance(node, TensorRef) and node.kind == "tensor":
                    name = stored.rename(node.name)
                    if name in stored.tensors:
                        self._want_slot(member, slot, name, stored.tensors[name])
                        continue
                if type(member.home.held) is Range and refers_to_tensors(node):
                    self.loading.differ("kind", place.name, "no tensors, as only a part is here", kind_of(node))
                    continue
                current = member.slots.get(slot)
                if isinstance(node, Provided) and current is not None:
                    self.loading.walk(current, place, node)
                    self.slots.setdefault(key, {})[slot] = _constant(current)
                    continue
                if self._agrees(member, slot, node, place):
                    anew.want(node, place)
                    self.slots.setdefault(key, {})[slot] = _building(anew, node, place)

    def _is_one(self, first: object, node: object, place: Place) -> bool:
        """Whether a listed value is the first one for its slot; a difference where rules make one slot of two unlike
        ones.
        """
        if first is node:
            return True
        one, other = (objects.encode(without_tensors(value), place.name) for value in (first, node))
        if one != other or refers_to_tensors(node):
            self.loading.differ("kind", place.name, "the value of what the rules join with it", "another value")
        return False

    def _agrees(self, member: Member, slot: object, node: object, place: Place) -> bool:
        """Whether to restore a listed slot: on this rank, and once for all members of a flat parameter."""
        if member.span is None:
            return member.here
        first, known = self._agreed.setdefault((id(member.owner), slot), (place.name, node))
        mine, theirs = (objects.encode(without_tensors(one), place.name) for one in (node, known))
        if mine != theirs:
            self.loading.differ("kind", place.name, f"as in '{first}', of the same flat parameter", "another value")
        return first == place.name

    def note_missing_slots(self) -> None:
        """Slots of a state dict that the checkpoint does not have; call it once the stored ones are requested."""
        if not isinstance(self.optimizer, StateDictOptimizer):
            return
        absent: dict[str, dict[object, object]] = {}
        for member in self.view.members():
            path = member.home.path
            known = self.kept.get(path, set()) | self.slots.get(path, {}).keys()
            absent[path] = {slot: value for slot, value in member.slots.items() if slot not in known}
        absence.note_slots(self.loading, self.optimizer, {path: of for path, of in absent.items() if of}, self.place)

    def want_rest(self, shared: object, extra: object) -> None:
        """Request state that belongs to no parameter, and entries that a subclass adds."""
        new_values = NewValues(self.loading, phase=Phase.OPTIMIZERS)
        inside = self.place.child("state")
        new_values.want(shared, inside)
        new_values.want(extra, self.place, self.view.extra)
        self.shared = _building(new_values, shared, inside)
        self.extra = _building(new_values, extra, self.place)

    def apply(self) -> None:
        """Set the whole state; load_state_dict() is called only if a subclass overrides it or has a hook."""
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
        """Let the class convert what earlier releases have saved, such as a `step` that is an int: torch's own
        load_state_dict() ends with this call. Slots that are the user's alone, without a tensor, are not shown to it.
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
                    next="load a checkpoint of this kind of optimizer; its tensors are already restored",
                ) from error
            finally:
                part.state = state

    def _is_as_it_was(self, state: Mapping[object, object]) -> bool:
        """Whether the optimizer has all slots already: its state_dict() contains the very dictionaries of its state."""
        if not self._keeps_all or self.view.whole_slots is None:
            return False
        owners = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        return all(map(is_, map(state.get, owners), self.view.whole_slots))

    def _apply_options(self, *optimizers: Core) -> None:
        """Set the groups' settings, in the optimizer and in the one that does its work."""
        for i, options in self.options.items():
            built = {key: make() for key, make in options.items()}
            for one in {id(one): one for one in (self.optimizer, *optimizers)}.values():
                one.param_groups[i].update(built)
                for key in self._removed.get(i, ()):
                    one.param_groups[i].pop(key, None)

    def _built(self, members: Sequence[Member]) -> dict[object, object]:
        """The future slots of an optimizer's own parameter. `members`: the parameter itself, or those in a flat one."""
        built: dict[object, object] = {}
        for member in members:
            if self._keeps_all:
                built.update(member.slots)
            kept = self.kept.get(member.home.path)
            if kept:
                built.update((slot, value) for slot, value in member.slots.items() if slot in kept)
            built.update((slot, make()) for slot, make in self.slots.get(member.home.path, {}).items())
        return built

    def _hand_over(self) -> None:
        """Call load_state_dict() with the state_dict() of the checkpoint, in the present order of parameters."""
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
        """Torch's own load_state_dict() casts slots to the parameter's dtype: set those that it changed again."""
        state_owner = self.view.state_owner
        owned = [parameter for group in state_owner.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(owned):
            current = state_owner.state.get(parameter, {})
            for slot, value in cast("dict[object, object]", given.get(number, {})).items():
                held = current.get(slot)
                if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) and held.dtype != value.dtype:
                    current[slot] = value


def _loads_itself(optimizer: Core) -> bool:
    """Whether load_state_dict() does more than torch's own, which casts slots to the parameter's dtype."""
    hooked = any(vars(part).get(name) for part in parts_of(optimizer) for name in _LOAD_HOOKS)
    return hooked or _overrides_load(optimizer)


def _overrides_load(optimizer: Core) -> bool:
    return any(
        type(part).load_state_dict is not torch.optim.Optimizer.load_state_dict or "load_state_dict" in vars(part)
        for part in parts_of(optimizer)
    )


_LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def _strides_like(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The strides that zeros_like() would give: the parameter's own if it is dense in some order."""
    if type(parameter) not in tensors.DENSE_TYPES:
        return None
    return torch.empty_like(parameter, device="meta", requires_grad=False).stride()


def _names_in(node: object) -> list[str]:
    if isinstance(node, TensorRef):
        return [node.name]
    if isinstance(node, Provided):
        return [part.name for part in node.parts.values()]
    if isinstance(node, dict):
        return [name for item in node.values() for name in _names_in(item)]
    return [name for item in node for name in _names_in(item)] if isinstance(node, (list, tuple)) else []


def _constant(value: object) -> Built:
    return lambda: value


def _building(new_values: NewValues, node: object, place: Place) -> Built:
    return lambda: new_values.build(node, place.name)


def _group(paths: Sequence[str]) -> str:
    """A group's members, as text."""
    return f"a group of {len(paths)}: {absence.listing(paths)}"
