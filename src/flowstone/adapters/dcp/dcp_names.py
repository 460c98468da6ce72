"""The names that torch.distributed.checkpoint (DCP) uses for the values of a checkpoint that a Checkpointer saved.
Left: Flowstone's names; right: DCP's.

    model.0.weight                              model.0.weight
    optimizer.state.model.0.weight.exp_avg      optimizer.state.0.weight.exp_avg
    {"params": [...], "options": {"lr": ...}}   optimizer.param_groups.0.lr; and optimizer.param_groups.0.weight.lr

The names on the right are those of get_model_state_dict and get_optimizer_state_dict. A setting of an optimizer has two
names: those of the nested and of the flattened form of get_optimizer_state_dict. In the name of an optimizer's value,
DCP writes the parameter's name in the model (`0.weight`), without the keys of the state that lead to the model
(`model`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias, cast

import msgspec

from flowstone.adapters.dcp.dcp_record import KeyPath, Leaves, references
from flowstone.format.inner_objects import StoredOptimizer, stored_optimizer
from flowstone.format.objects import TensorRef
from flowstone.reading.checkpoint import Checkpoint

_Nodes: TypeAlias = "Mapping[object, object]"


class DcpNames(msgspec.Struct, frozen=True):
    """The values of a checkpoint under DCP's names (`leaves`). `names`: DCP's name of a tensor -> its name in the
    index.
    """

    leaves: Leaves
    names: Mapping[str, str]


def derive_dcp_names(checkpoint: Checkpoint) -> DcpNames:
    """DCP's names for the values of a checkpoint. Values that each rank has for itself are left out, since DCP has no
    such values.
    """
    collected = _NameCollector()
    sections = checkpoint.objects
    for section, node in sections.items():
        collected.add(node, (section,))
    hidden = {ref.name for ref in references(collected.objects.values())} | set(collected.names.values())
    own = _ModulePaths(sections)
    optimizers = {".".join(path): path for path in collected.optimizers}
    for name in checkpoint.index.rows():
        if name in hidden or "@" in name:
            continue
        slot = _slot_of(name, optimizers, own)
        collected.tensor(own.path_of(name) if slot is None else slot, name)
    for path, stored in collected.optimizers.items():
        collected.add_groups(path, stored, own)
    return DcpNames(Leaves(collected.paths, collected.objects), collected.names)


class _NameCollector:
    """Collects values of a checkpoint under their names in DCP."""

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
        """Add the value at `path`. As in DCP, dicts are flattened, and so are lists that contain tensors or dicts."""
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
            for index, item in enumerate(node):
                self.add(item, (*path, index))
        else:
            self.value(path, node)

    def add_groups(self, path: tuple[str, ...], stored: StoredOptimizer, own: _ModulePaths) -> None:
        """Add the settings of an optimizer, and the values of its state that are not tensors."""
        for number, group in enumerate(stored.groups):
            params = [own.name_in_module(param) for param in group.params]
            self.value((*path, "param_groups", number, "params"), params)
            for key, setting in group.options.items():
                self.value((*path, "param_groups", number, str(key)), setting)
                for param in params:
                    self.value((*path, f"param_groups.{param}.{key}"), setting)
        for param, slots in stored.listed.items():
            for key, slot in slots.items():
                self.add(slot, (*path, "state", own.name_in_module(param), str(key)))


def _is_leaf(values: Iterable[object]) -> bool:
    """Whether DCP stores a list as one object, because it contains no tensors or dicts at any depth."""
    return not any(
        isinstance(value, dict) or (isinstance(value, TensorRef) and value.kind == "tensor")
        or (isinstance(value, list) and not _is_leaf(value))
        for value in values
    )


class _ModulePaths:
    """Splits a tensor's full name into the keys of the state that lead to its module, and the tensor's name in that
    module.
    """

    def __init__(self, sections: Mapping[str, object]) -> None:
        self._sections = sections

    def path_of(self, name: str) -> KeyPath:
        """The keys for a module's tensor. The last key is the tensor's name in the module."""
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

    def name_in_module(self, name: str) -> str:
        """A parameter's name in its module."""
        return str(self.path_of(name)[-1])


def _prefixes(name: str) -> Iterator[str]:
    """Yields `name`, then `name` without the text after its last dot, and so on: for "a.b.c" also "a.b" and "a"."""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _slot_of(name: str, optimizers: Mapping[str, tuple[str, ...]], own: _ModulePaths) -> KeyPath | None:
    """The keys under which DCP has a tensor of an optimizer's state. None for any other tensor."""
    for name_of, path in optimizers.items():
        inside = f"{name_of}.state."
        if name.startswith(inside):
            param, _, slot = name[len(inside) :].rpartition(".")
            return (*path, "state", own.name_in_module(param), slot)
    return None
