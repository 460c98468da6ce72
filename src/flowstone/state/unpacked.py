"""State dicts, unpacked: modules and optimizers that hold the very tensors of the dicts.

Frameworks hand over state dicts instead of objects. Unpacked, these are saved under the names that the objects
themselves would have, so that either loads what the other has saved, on any number of ranks. Four forms are known:

    a module's          {name: tensor, ...}, with "_extra_state" entries
    an optimizer's      {"state": {number: slots}, "param_groups": [...]}, as torch.optim returns it
    named               the same with names of parameters for numbers, as `get_optimizer_state_dict` returns it
    flattened           {"state.<name>.<slot>": tensor, "param_groups.<name>.<option>": value}, the same flattened

Numbers alone do not say which parameter is meant: such an optimizer's is unpacked where its groups have `param_names`,
or where a stored optimizer gives their order. Else it stays the plain dict that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, cast

import msgspec
import torch

from flowstone.format.inner_objects import StoredOptimizer, stored_optimizer
from flowstone.state.names import strip_wrappers
from flowstone.state.optimizer_view import NOT_OPTIONS
from flowstone.state.state_dict_objects import ExtraStateModule, StateDictModule, StateDictOptimizer
from flowstone.state.state_dicts import is_optimizers

_PACKED = frozenset({"state", "param_groups"})
_STATE, _GROUPS = "state.", "param_groups."
_EXTRA_STATE = "_extra_state"
_DEPTH_MAX = 8  # dicts inside of dicts that are looked into

Dict: TypeAlias = "dict[Any, Any]"


class UnpackedStateDict(msgspec.Struct, frozen=True):
    """State dicts as objects.

    state  to be saved or loaded in their place; what was not unpacked is in it as it is
    """

    state: dict[str, object]
    _pack: Sequence[Callable[[], None]] = ()

    def pack(self) -> None:
        """Write what a load has put into the objects back into the dicts that they came from."""
        for step in reversed(self._pack):  # the innermost first
            step()


def unpack(state_dict: Mapping[str, object], stored: Mapping[str, object] | None = None) -> UnpackedStateDict:
    """Objects that hold the tensors of `state_dict`, whose forms are above.

    stored  the objects of the checkpoint that is to be loaded: its optimizers give the order of parameters
    """
    unpacking = _Unpacking(stored or {})
    modules = unpacking.modules(state_dict, ())
    state = unpacking.optimizers(modules, ())
    return UnpackedStateDict(cast("dict[str, object]", state), unpacking.pack)


@dataclass(slots=True, eq=False)
class _Unpacking:
    """One walk for modules, one for the optimizers of their parameters."""

    stored: Mapping[str, object]
    pack: list[Callable[[], None]] = field(default_factory=list)
    parameters: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # by section, by name

    def modules(self, value: object, path: tuple[str, ...]) -> object:
        """`value` with modules for their state dicts; the same object, if there is none."""
        if path and is_module(value):
            return self._module(cast("Dict", value), path)
        if is_optimizers(value):  # its slots are dicts of tensors, too
            return value
        return self._inside(value, path, self.modules)

    def optimizers(self, value: object, path: tuple[str, ...]) -> object:
        """`value` with optimizers for their state dicts."""
        form = _form_of(value) if path else None
        if form is not None:
            return form(self, cast("Dict", value), path)
        return self._inside(value, path, self.optimizers)

    def _inside(
        self, value: object, path: tuple[str, ...], walk: Callable[[object, tuple[str, ...]], object]
    ) -> object:
        """A dict with `walk` applied to its values; the same dict where that changes none."""
        if not (isinstance(value, dict) or (not path and isinstance(value, Mapping))) or len(path) > _DEPTH_MAX:
            return value
        if not all(type(key) is str for key in value):
            return value
        made = {key: walk(item, (*path, key)) for key, item in value.items()}
        if path and all(made[key] is item for key, item in value.items()):
            return value
        original, before = value, dict(made)
        if isinstance(original, dict):
            self.pack.append(lambda: original.update(
                {key: item for key, item in made.items() if item is not before[key]}  # replaced by the load
            ))
        return made

    def _module(self, value: Dict, path: tuple[str, ...]) -> StateDictModule:
        extras = [key for key in value if key.endswith(_EXTRA_STATE)]
        module = ExtraStateModule() if _EXTRA_STATE in value else StateDictModule()
        by_tensor: dict[int, torch.Tensor] = {}  # tied ones stay one
        mine = self.parameters.setdefault(".".join(path), {})
        for key, item in value.items():
            if key in extras:
                continue
            name = strip_wrappers(key)
            if id(item) in by_tensor:
                owner, leaf = module.submodule(name)
                owner._parameters[leaf] = cast("torch.nn.Parameter", by_tensor[id(item)])
            else:
                by_tensor[id(item)] = module.put_tensor(name, item)
            mine[name] = by_tensor[id(item)]
        for key in extras:
            name = strip_wrappers(key)
            if name == _EXTRA_STATE:
                extra = cast("ExtraStateModule", module)
                extra.value = value[key]
            else:
                extra = module.put_extra_state(name, value[key])
            self.pack.append(partial(_put_extra, value, key, extra))
        return module

    def parameter(self, name: str, path: str, slots: Mapping[object, object]) -> tuple[torch.Tensor, bool]:
        """The parameter of a module here that an optimizer calls `name`, or else one of no module; which of both.

        path  what a stored optimizer calls it; else ""
        """
        name = strip_wrappers(name)
        for section, mine in self.parameters.items():
            if path and path.startswith(f"{section}.") and path[len(section) + 1 :] in mine:
                return mine[path[len(section) + 1 :]], True
        for mine in self.parameters.values():
            if not path and name in mine:
                return mine[name], True
        alike = [one for one in slots.values() if isinstance(one, torch.Tensor) and one.dim()]
        shape = max(alike, key=torch.Tensor.numel).detach() if alike else torch.empty(0)
        return torch.nn.Parameter(shape, requires_grad=False), False

    def stored_at(self, path: tuple[str, ...]) -> StoredOptimizer | None:
        """What the checkpoint holds of the optimizer at `path`."""
        return stored_optimizer(self._node(path))

    def stored_counts(self, path: tuple[str, ...]) -> list[int]:
        """How many parameters each group has, where the checkpoint holds a state dict that numbers them."""
        node = self._node(path)
        if not is_optimizers(node) or stored_optimizer(node) is not None:
            return []
        return [len(group["params"]) for group in cast("Dict", node)["param_groups"]]

    def _node(self, path: tuple[str, ...]) -> object:
        node: object = self.stored
        for key in path:
            node = node.get(key) if isinstance(node, Mapping) else None
        return node


def _put_extra(value: Dict, key: str, extra: ExtraStateModule) -> None:
    value[key] = extra.value


def is_module(value: object) -> bool:
    """Whether it is a module's state dict: tensors by name, and extra state."""
    if not isinstance(value, dict) or not value or not all(type(key) is str and key for key in value):
        return False
    tensors = [isinstance(item, torch.Tensor) for key, item in value.items() if not key.endswith(_EXTRA_STATE)]
    return bool(tensors) and all(tensors) and not any(key.startswith(_GROUPS) for key in value)


class _Group(msgspec.Struct, frozen=True):
    """A group to be: keys of its parameters in the dict, their names, paths where stored, and its options.

    numbered  the names are numbers: they name no parameter of a module
    """

    keys: Sequence[object]
    names: Sequence[str]
    paths: Sequence[str]
    options: Mapping[str, object]
    numbered: bool = False


def _state_dict_optimizer(
    unpacking: _Unpacking, groups: Sequence[_Group], slots: Mapping[object, Dict]
) -> tuple[StateDictOptimizer, list[tuple[object, torch.Tensor]]] | None:
    """An optimizer of these groups and slots, and its parameters by their keys; None where there is no parameter."""
    members: list[tuple[object, torch.Tensor]] = []
    made: list[dict[str, object]] = []
    for group in groups:
        found = [
            unpacking.parameter("" if group.numbered else name, path, slots.get(key, {}))
            for key, name, path in zip(group.keys, group.names, group.paths, strict=True)
        ]
        own = [parameter for parameter, _ in found]
        members += zip(group.keys, own, strict=True)
        made.append({"params": own, **group.options})
        if not all(known for _, known in found):
            made[-1]["param_names"] = [path or name for name, path in zip(group.names, group.paths, strict=True)]
    if not made or len({id(parameter) for _, parameter in members}) != len(members):
        return None
    names = [one.pop("param_names", None) for one in made]  # which Optimizer takes together with tensors only
    optimizer = StateDictOptimizer(made, {})
    optimizer.numbered = any(group.numbered for group in groups)
    for made_group, own_names in zip(optimizer.param_groups, names, strict=True):
        if own_names is not None:
            made_group["param_names"] = own_names
    for key, parameter in members:
        if key in slots:
            optimizer.state[parameter] = slots[key]
    known = {key for key, _ in members}
    shared = cast("dict[object, object]", optimizer.state)  # what belongs to no parameter
    shared.update({key: own for key, own in slots.items() if key not in known})
    return optimizer, members


def _unpack_packed(unpacking: _Unpacking, value: Dict, path: tuple[str, ...]) -> object:
    """An optimizer for what Optimizer.state_dict() or get_optimizer_state_dict() returned."""
    groups = _groups_of(value, unpacking.stored_at(path), by_order=bool(unpacking.stored_counts(path)))
    held = None if groups is None else _state_dict_optimizer(unpacking, groups, value["state"])
    if held is None:
        return value
    optimizer, members = held

    def pack() -> None:
        slots: dict[object, object] = {
            key: optimizer.state[parameter] for key, parameter in members if parameter in optimizer.state
        }
        slots.update((key, own) for key, own in optimizer.state.items() if not isinstance(key, torch.Tensor))
        value["state"].clear()
        value["state"].update(slots)
        for mine, group in zip(value["param_groups"], optimizer.param_groups, strict=True):
            kept = {key: mine[key] for key in NOT_OPTIONS & mine.keys()}
            options = {key: item for key, item in group.items() if key not in NOT_OPTIONS}
            mine.clear()
            mine.update({**options, **kept})

    unpacking.pack.append(pack)
    return optimizer


def _groups_of(value: Dict, stored: StoredOptimizer | None, *, by_order: bool) -> list[_Group] | None:
    """The groups with a name for each parameter; None where nothing gives one.

    by_order  the checkpoint has a state dict, too, whose parameters are matched by their order
    """
    found: list[_Group] = []
    for i, group in enumerate(value["param_groups"]):
        keys = group["params"]
        options = {key: item for key, item in group.items() if key not in NOT_OPTIONS}
        names, paths = group.get("param_names", keys), [""] * len(keys)
        if not all(type(name) is str for name in names) or len(names) != len(keys):
            if by_order:
                found.append(_Group(keys, list(map(str, keys)), [""] * len(keys), options, numbered=True))
                continue
            if stored is None or len(stored.groups) != len(value["param_groups"]):
                return None
            names = paths = stored.groups[i].params
            if len(paths) != len(keys):
                return None
        found.append(_Group(keys, names, paths, options))
    return found


def _unpack_flat(unpacking: _Unpacking, value: Dict, path: tuple[str, ...]) -> object:
    """An optimizer for what get_optimizer_state_dict() has flattened."""
    options: dict[str, dict[str, object]] = {}
    for key, item in value.items():
        if key.startswith(_GROUPS):
            name, _, option = key[len(_GROUPS) :].rpartition(".")
            options.setdefault(name, {})[option] = item
    slots: dict[object, Dict] = {}
    for key, item in value.items():
        if key.startswith(_STATE):
            name, slot = _split_slot(key[len(_STATE) :], options)
            slots.setdefault(name, {})[slot] = item
    counts = unpacking.stored_counts(path)
    if sum(counts) == len(options):
        groups = list(_by_count(options, counts))
    else:
        groups = list(_flat_groups(options, unpacking.stored_at(path)))
    held = _state_dict_optimizer(unpacking, groups, slots)
    if held is None:
        return value
    optimizer, members = held
    optimizer.complete = True

    def pack() -> None:
        for name, parameter in members:
            for slot, item in optimizer.state.get(parameter, {}).items():
                value[f"{_STATE}{name}.{slot}"] = item
        by_id = {id(parameter): name for name, parameter in members}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for option, item in group.items():
                    if option not in NOT_OPTIONS:
                        value[f"{_GROUPS}{by_id[id(parameter)]}.{option}"] = item

    unpacking.pack.append(pack)
    return optimizer


def _split_slot(text: str, names: Mapping[str, object]) -> tuple[str, str]:
    """The parameter's name and the slot's of `<name>.<slot>`: the longest name that is one."""
    end = text.rfind(".")
    while end != -1:
        if text[:end] in names:
            return text[:end], text[end + 1 :]
        end = text.rfind(".", 0, end)
    name, _, slot = text.rpartition(".")
    return name, slot


def _by_count(options: Mapping[str, dict[str, object]], counts: Sequence[int]) -> Iterator[_Group]:
    """Groups of so many parameters each, in order."""
    names = iter(options)
    for count in counts:
        own = list(islice(names, count))
        yield _Group(own, own, [""] * count, options[own[0]] if own else {})


def _flat_groups(options: Mapping[str, dict[str, object]], stored: StoredOptimizer | None) -> Iterator[_Group]:
    """The groups that were flattened: as stored, else one for all parameters of the same options.

    What names only some of the parameters here, and some that are not here, is stored under other names: rules change
    them.
    """
    left = dict(options)
    found: list[_Group] = []
    absent = False
    for group in stored.groups if stored is not None else ():
        ends = {path: [name for name in left if path == name or path.endswith(f".{strip_wrappers(name)}")]
                for path in group.params}
        pairs = [(max(names, key=len), path) for path, names in ends.items() if names]
        absent = absent or len(pairs) < len(ends)
        for name, _ in pairs:
            left.pop(name, None)
        if pairs:
            names = [name for name, _ in pairs]
            found.append(_Group(names, names, [path for _, path in pairs], options[names[0]]))
    if absent and left:
        left = dict(options)
    else:
        yield from found
    same: list[tuple[dict[str, object], list[str]]] = []
    for name, own in left.items():
        for other, names in same:
            if _alike(own, other):
                names.append(name)
                break
        else:
            same.append((own, [name]))
    for own, names in same:
        yield _Group(names, names, [""] * len(names), own)


def _alike(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    return one.keys() == other.keys() and all(
        item is other[key] or (not isinstance(item, torch.Tensor) and type(item) is type(other[key])
                               and bool(item == other[key]))
        for key, item in one.items()
    )


def is_optimizer(value: object) -> bool:
    """Whether it is an optimizer's state dict, of any form."""
    return _form_of(value) is not None or is_optimizers(value)


def _form_of(value: object) -> Callable[[_Unpacking, Dict, tuple[str, ...]], object] | None:
    """How the optimizer's state dict that `value` is is unpacked; None for anything else."""
    if not isinstance(value, dict) or not value:
        return None
    if value.keys() == _PACKED and is_optimizers(value):
        return _unpack_packed
    if all(type(key) is str and key.startswith((_STATE, _GROUPS)) for key in value) and any(
        key.startswith(_GROUPS) for key in value
    ):
        return _unpack_flat
    return None
