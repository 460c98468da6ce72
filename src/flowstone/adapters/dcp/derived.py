"""A checkpoint that a Checkpointer has saved, as DCP would call what is in it.

    model.0.weight                              model.0.weight
    optimizer.state.model.0.weight.exp_avg      optimizer.state.0.weight.exp_avg
    {"params": [...], "options": {"lr": ...}}   optimizer.param_groups.0.lr; and optimizer.param_groups.0.weight.lr

On the right is what get_model_state_dict and get_optimizer_state_dict make, the latter nested and flattened: parameters
are called as in their model, wherever that lies in the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias, cast

import msgspec

from flowstone.adapters.dcp.layout import KeyPath, Leaves, references
from flowstone.checkpoint import Checkpoint
from flowstone.format.inner_objects import StoredOptimizer, stored_optimizer
from flowstone.format.objects import TensorRef

_Nodes: TypeAlias = "Mapping[object, object]"


class Derived(msgspec.Struct, frozen=True):
    """leaves: as of a checkpoint that DCP has written. names: of tensors, in DCP and in the index."""

    leaves: Leaves
    names: Mapping[str, str]


def derive(checkpoint: Checkpoint) -> Derived:
    """What DCP would call the values of a checkpoint. What ranks keep for themselves is left out: DCP knows none."""
    found = _Found()
    sections = checkpoint.objects
    for section, node in sections.items():
        found.add(node, (section,))
    hidden = {ref.name for ref in references(found.objects.values())} | set(found.names.values())
    own = _Modules(sections)
    optimizers = {".".join(path): path for path in found.optimizers}
    for name in checkpoint.index.rows():
        if name in hidden or "@" in name:
            continue
        slot = _slot_of(name, optimizers, own)
        found.tensor(own.path_of(name) if slot is None else slot, name)
    for path, stored in found.optimizers.items():
        found.add_groups(path, stored, own)
    return Derived(Leaves(found.paths, found.objects), found.names)


class _Found:
    """What is known so far, by names in DCP."""

    def __init__(self) -> None:
        self.paths: dict[str, KeyPath] = {}
        self.objects: dict[str, object] = {}
        self.names: dict[str, str] = {}
        self.optimizers: dict[tuple[str, ...], StoredOptimizer] = {}

    def tensor(self, path: KeyPath, stored: str) -> None:
        name = ".".join(map(str, path))
        self.paths[name], self.names[name] = path, stored

    def value(self, path: KeyPath, node: object) -> None:
        name = ".".join(map(str, path))
        self.paths[name], self.objects[name] = path, node

    def add(self, node: object, path: KeyPath) -> None:
        """What lies at `path`, flattened as DCP does: dicts, and lists with tensors or dicts in them."""
        if isinstance(node, TensorRef) and node.kind == "tensor":
            self.tensor(path, node.name)
        elif isinstance(node, dict):
            stored = stored_optimizer(node)
            if stored is not None and all(type(key) is str for key in path):
                self.optimizers[cast("tuple[str, ...]", path)] = stored
                return
            for key, item in node.items():
                self.add(item, (*path, str(key)))
        elif isinstance(node, list) and not _is_leaf(node):
            for at, item in enumerate(node):
                self.add(item, (*path, at))
        else:
            self.value(path, node)

    def add_groups(self, path: tuple[str, ...], stored: StoredOptimizer, own: _Modules) -> None:
        """The settings of an optimizer, and what it keeps for parameters that is no tensor."""
        for at, group in enumerate(stored.groups):
            params = [own.inside(param) for param in group.params]
            self.value((*path, "param_groups", at, "params"), params)
            for key, setting in group.options.items():
                self.value((*path, "param_groups", at, str(key)), setting)
                for param in params:
                    self.value((*path, f"param_groups.{param}.{key}"), setting)
        for param, slots in stored.listed.items():
            for key, slot in slots.items():
                self.add(slot, (*path, "state", own.inside(param), str(key)))


def _is_leaf(values: Iterable[object]) -> bool:
    """Whether DCP takes a list for one object: no tensors in it, no dicts, and no lists that are none."""
    return not any(
        isinstance(one, dict) or (isinstance(one, TensorRef) and one.kind == "tensor")
        or (isinstance(one, list) and not _is_leaf(one))
        for one in values
    )


class _Modules:
    """Where modules lie in a state: as deep as the names of their tensors follow its keys."""

    def __init__(self, sections: Mapping[str, object]) -> None:
        self._sections = sections

    def path_of(self, name: str) -> KeyPath:
        """The keys that lead to a tensor of a module; the last is what the module calls it."""
        keys: list[str] = []
        node: object = self._sections
        rest = name
        while isinstance(node, dict):
            key = next((key for key in _prefixes(rest) if key in cast("_Nodes", node)), None)
            if key is None:
                break
            keys.append(key)
            node, rest = cast("_Nodes", node)[key], rest[len(key) + 1 :]
        return (*keys, rest) if rest else tuple(keys)

    def inside(self, name: str) -> str:
        """What its module calls a parameter."""
        return str(self.path_of(name)[-1])


def _prefixes(name: str) -> Iterator[str]:
    """`name` up to each of its dots, the longest first, and all of it."""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _slot_of(name: str, optimizers: Mapping[str, tuple[str, ...]], own: _Modules) -> KeyPath | None:
    """The keys that lead to a tensor of an optimizer's state in DCP; None if it is none."""
    for at, path in optimizers.items():
        inside = f"{at}.state."
        if name.startswith(inside):
            param, _, slot = name[len(inside) :].rpartition(".")
            return (*path, "state", own.inside(param), slot)
    return None
