"""Unpacks state dicts into modules and optimizers that hold the same tensors.

Some frameworks pass state dicts instead of objects. If these are unpacked, their tensors get the same names as those of
the objects, so that a checkpoint of objects can be loaded into state dicts and vice versa, on any number of ranks. Four
forms of state dicts are known:

    of a module              {name: tensor, ...}, with "_extra_state" entries
    of an optimizer          {"state": {number: slots}, "param_groups": [...]}, as torch.optim returns it
    with names               like that of an optimizer, but with names of parameters instead of numbers, as
                             `get_optimizer_state_dict` returns it
    flattened                {"state.<name>.<slot>": tensor, "param_groups.<name>.<option>": value}

Numbers alone do not identify parameters. So an optimizer's dict with numbers is unpacked only if its groups have
`param_names`, or if a stored optimizer gives the order. Otherwise it stays a plain dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, cast

import msgspec
import torch

from flowstone.format.inner_objects import StoredOptimizer, stored_optimizer
from flowstone.state.names import strip_wrappers
from flowstone.state.state_dicts import is_optimizer_state_dict
from flowstone.torch.optimizer_view import NOT_OPTIONS
from flowstone.torch.state_dict_objects import ExtraStateModule, StateDictModule, StateDictOptimizer

_PACKED = frozenset({"state", "param_groups"})
_STATE, _GROUPS = "state.", "param_groups."
_EXTRA_STATE = "_extra_state"
_DEPTH_MAX = 8  # levels of nested dicts that are searched

Dict: TypeAlias = "dict[Any, Any]"


class UnpackedState(msgspec.Struct, frozen=True):
    """The objects that were made from state dicts.

    state  the state to save or load in place of the dicts; values that were not unpacked are unchanged in it
    """

    state: dict[str, object]
    _pack: Sequence[Callable[[], None]] = ()

    def pack(self) -> None:
        """Write the values that a load has put into the objects back into the original dicts."""
        for step in reversed(self._pack):  # the innermost dicts come first
            step()


def unpack(state_dict: Mapping[str, object], stored: Mapping[str, object] | None = None) -> UnpackedState:
    """Make modules and optimizers with the tensors of `state_dict`.

    stored  the objects of the checkpoint that will be loaded; its optimizers give the order of parameters
    """
    unpacking = _Unpacking(stored or {})
    modules = unpacking.modules(state_dict, ())
    state = unpacking.optimizers(modules, ())
    return UnpackedState(cast("dict[str, object]", state), unpacking.pack)


class _Unpacking(msgspec.Struct, eq=False):
    """The unpacking of one state dict: first its modules, then its optimizers."""

    stored: Mapping[str, object]
    pack: list[Callable[[], None]] = msgspec.field(default_factory=list)
    parameters: dict[str, dict[str, torch.Tensor]] = msgspec.field(default_factory=dict)  # section -> name -> parameter

    def modules(self, value: object, path: tuple[str, ...]) -> object:
        """`value` with modules in place of their state dicts. The same object if it contains no module's state dict."""
        if path and is_module_dict(value):
            return self._module(cast("Dict", value), path)
        if is_optimizer_state_dict(value):  # else its slots, dicts of tensors, would be taken for modules
            return value
        return self._inside(value, path, self.modules)

    def optimizers(self, value: object, path: tuple[str, ...]) -> object:
        """`value` with optimizers in place of their state dicts."""
        form = _form_of(value) if path else None
        if form is not None:
            return form(self, cast("Dict", value), path)
        return self._inside(value, path, self.optimizers)

    def _inside(
        self, value: object, path: tuple[str, ...], walk: Callable[[object, tuple[str, ...]], object]
    ) -> object:
        """The dict `value` with each of its values replaced by the result of `walk`. The same dict if none changes."""
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
                {key: item for key, item in made.items() if item is not before[key]}  # values that the load replaced
            ))
        return made

    def _module(self, value: Dict, path: tuple[str, ...]) -> StateDictModule:
        extras = [key for key in value if key.endswith(_EXTRA_STATE)]
        module = ExtraStateModule() if _EXTRA_STATE in value else StateDictModule()
        by_tensor: dict[int, torch.Tensor] = {}  # so that tied tensors become one parameter
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
                extra.set_extra_state(value[key])
            else:
                extra = module.put_extra_state(name, value[key])
            self.pack.append(partial(_put_extra, value, key, extra))
        return module

    def parameter(self, name: str, path: str, slots: Mapping[object, object]) -> tuple[torch.Tensor, bool]:
        """The parameter that an optimizer calls `name`: that of a module, or, if no module has it, a new one. Also
        returns whether it is a module's.

        path  the parameter's name in the stored optimizer; "" if there is none
        """
        name = strip_wrappers(name)
        for section, mine in self.parameters.items():
            if path and path.startswith(f"{section}.") and path[len(section) + 1 :] in mine:
                return mine[path[len(section) + 1 :]], True
        for mine in self.parameters.values():
            if not path and name in mine:
                return mine[name], True
        alike = [tensor for tensor in slots.values() if isinstance(tensor, torch.Tensor) and tensor.dim()]
        shape = max(alike, key=torch.Tensor.numel).detach() if alike else torch.empty(0)
        return torch.nn.Parameter(shape, requires_grad=False), False

    def stored_at(self, path: tuple[str, ...]) -> StoredOptimizer | None:
        """The stored optimizer at `path`."""
        return stored_optimizer(self._node(path))

    def stored_counts(self, path: tuple[str, ...]) -> list[int]:
        """How many parameters each group has, if the checkpoint has a state dict that numbers them."""
        node = self._node(path)
        if not is_optimizer_state_dict(node) or stored_optimizer(node) is not None:
            return []
        return [len(group["params"]) for group in cast("Dict", node)["param_groups"]]

    def _node(self, path: tuple[str, ...]) -> object:
        node: object = self.stored
        for key in path:
            node = node.get(key) if isinstance(node, Mapping) else None
        return node


def _put_extra(value: Dict, key: str, extra: ExtraStateModule) -> None:
    value[key] = extra.value


def is_module_dict(value: object) -> bool:
    """Whether `value` is the state dict of a module: tensors by name, and extra state."""
    if not isinstance(value, dict) or not value or not all(type(key) is str and key for key in value):
        return False
    tensors = [isinstance(item, torch.Tensor) for key, item in value.items() if not key.endswith(_EXTRA_STATE)]
    return bool(tensors) and all(tensors) and not any(key.startswith(_GROUPS) for key in value)


class _Group(msgspec.Struct, frozen=True):
    """A parameter group of an optimizer to be made: the keys of its parameters in the dict, their names, their paths in
    the stored optimizer, and the group's options.

    numbered  whether the names are only numbers, so that no parameter of a module has such a name
    """

    keys: Sequence[object]
    names: Sequence[str]
    paths: Sequence[str]
    options: Mapping[str, object]
    numbered: bool = False


def _state_dict_optimizer(
    unpacking: _Unpacking, groups: Sequence[_Group], slots: Mapping[object, Dict], *, complete: bool = False
) -> tuple[StateDictOptimizer, list[tuple[object, torch.Tensor]]] | None:
    """An optimizer with these groups and slots, and its parameters with their keys. None if there is no parameter."""
    members: list[tuple[object, torch.Tensor]] = []
    made: list[dict[str, object]] = []
    for group in groups:
        parameters = [
            unpacking.parameter("" if group.numbered else name, path, slots.get(key, {}))
            for key, name, path in zip(group.keys, group.names, group.paths, strict=True)
        ]
        own = [parameter for parameter, _ in parameters]
        members += zip(group.keys, own, strict=True)
        made.append({"params": own, **group.options})
        if not all(is_of_module for _, is_of_module in parameters):
            made[-1]["param_names"] = [path or name for name, path in zip(group.names, group.paths, strict=True)]
    if not made or len({id(parameter) for _, parameter in members}) != len(members):
        return None
    names = [group.pop("param_names", None) for group in made]  # torch's Optimizer accepts names only with the tensors
    optimizer = StateDictOptimizer(made, {})
    optimizer.complete, optimizer.numbered = complete, any(group.numbered for group in groups)
    for made_group, own_names in zip(optimizer.param_groups, names, strict=True):
        if own_names is not None:
            made_group["param_names"] = own_names
    for key, parameter in members:
        if key in slots:
            optimizer.state[parameter] = slots[key]
    keys = {key for key, _ in members}
    shared = cast("dict[object, object]", optimizer.state)  # gets the entries that belong to no parameter
    shared.update({key: own for key, own in slots.items() if key not in keys})
    return optimizer, members


def _unpack_packed(unpacking: _Unpacking, value: Dict, path: tuple[str, ...]) -> object:
    """Make an optimizer from the result of Optimizer.state_dict() or get_optimizer_state_dict()."""
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
    """The groups with a name for each parameter; None if parameters have no names.

    by_order  whether the checkpoint has a state dict with numbered parameters in this place, and not an optimizer.
              Parameters are then matched by their order, and those without names get their numbers as names
    """
    groups: list[_Group] = []
    for i, group in enumerate(value["param_groups"]):
        keys = group["params"]
        options = {key: item for key, item in group.items() if key not in NOT_OPTIONS}
        names, paths = group.get("param_names", keys), [""] * len(keys)
        if not all(type(name) is str for name in names) or len(names) != len(keys):
            if by_order:
                groups.append(_Group(keys, list(map(str, keys)), [""] * len(keys), options, numbered=True))
                continue
            if stored is None or len(stored.groups) != len(value["param_groups"]):
                return None
            names = paths = stored.groups[i].params
            if len(paths) != len(keys):
                return None
        groups.append(_Group(keys, names, paths, options))
    return groups


def _unpack_flat(unpacking: _Unpacking, value: Dict, path: tuple[str, ...]) -> object:
    """Make an optimizer from a flattened result of get_optimizer_state_dict()."""
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
    held = _state_dict_optimizer(unpacking, groups, slots, complete=True)
    if held is None:
        return value
    optimizer, members = held

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
    """Split `<name>.<slot>` into the longest name of a parameter in `names` with which it begins, and the slot's name.
    """
    end = text.rfind(".")
    while end != -1:
        if text[:end] in names:
            return text[:end], text[end + 1 :]
        end = text.rfind(".", 0, end)
    name, _, slot = text.rpartition(".")
    return name, slot


def _by_count(options: Mapping[str, dict[str, object]], counts: Sequence[int]) -> Iterator[_Group]:
    """Divide the parameters into groups of `counts` parameters each, in order. `options`: the options of each
    parameter.
    """
    names = iter(options)
    for count in counts:
        own = list(islice(names, count))
        yield _Group(own, own, [""] * count, options[own[0]] if own else {})


def _flat_groups(options: Mapping[str, dict[str, object]], stored: StoredOptimizer | None) -> Iterator[_Group]:
    """The groups as they were before flattening: those of the stored optimizer. If there is no stored optimizer, or
    only some parameters of its groups are in the dict (because rules will change names): a group for each distinct set
    of options.
    """
    left = dict(options)
    groups: list[_Group] = []
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
            groups.append(_Group(names, names, [path for _, path in pairs], options[names[0]]))
    if absent and left:
        left = dict(options)
    else:
        yield from groups
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


def _alike(group: Mapping[str, object], other: Mapping[str, object]) -> bool:
    return group.keys() == other.keys() and all(
        item is other[key] or (not isinstance(item, torch.Tensor) and type(item) is type(other[key])
                               and bool(item == other[key]))
        for key, item in group.items()
    )


def is_optimizer_dict(value: object) -> bool:
    """Whether `value` is the state dict of an optimizer, in any of the known forms."""
    return _form_of(value) is not None or is_optimizer_state_dict(value)


def _form_of(value: object) -> Callable[[_Unpacking, Dict, tuple[str, ...]], object] | None:
    """The function that unpacks `value`, if it is an optimizer's state dict; otherwise None."""
    if not isinstance(value, dict) or not value:
        return None
    if value.keys() == _PACKED and is_optimizer_state_dict(value):
        return _unpack_packed
    if all(type(key) is str and key.startswith((_STATE, _GROUPS)) for key in value) and any(
        key.startswith(_GROUPS) for key in value
    ):
        return _unpack_flat
    return None
