"""Module trees: state_dict() and named_parameters() of an ordinary module, computed in one walk.

torch's own walks cost two calls and a dictionary for every module, several times for each save. The walk in this file
is for trees in which no module overrides state_dict(); for other trees state_dict() is called.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from flowstone.state.names import WRAPPERS
from flowstone.torch.tensors import DENSE_TYPES

_DEPTH_MAX = 500  # deeper trees are left to torch's own recursion
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_TABLES = ("_parameters", "_buffers", "_modules")


class ModuleTree(msgspec.Struct, frozen=True, eq=False):
    """A module's parameters and persistent buffers, in the order of its state_dict(keep_vars=True).

    keys        the keys of state_dict()
    names       the keys without wrappers' prefixes
    values      the module's own tensors
    parameters  for each entry, whether it is registered as a parameter
    dense       whether all values are tensors in plain memory
    self_changing  ids of parameters that also change without a step, see `find_self_changing`
    """

    keys: Sequence[str]
    names: Sequence[str]
    values: Sequence[torch.Tensor]
    parameters: Sequence[bool]
    dense: bool
    self_changing: frozenset[int] = frozenset()


def tree_of(module: torch.nn.Module) -> ModuleTree | None:
    """The tree below `module`; None if a module in it overrides state_dict(), or has hooks or extra state."""
    keys: list[str] = []
    names: list[str] = []
    values: list[torch.Tensor] = []
    parameters: list[bool] = []
    ordinary: dict[type, bool] = {}
    may_be_restless: dict[type, bool] = {}
    restless: set[int] = set()
    waiting: list[tuple[torch.nn.Module, str, str, int]] = [(module, "", "", 0)]
    while waiting:
        inner_module, prefix, bare, depth = waiting.pop()
        kind, fields = type(inner_module), vars(inner_module)
        if kind not in ordinary:
            ordinary[kind], may_be_restless[kind] = _leaves_state_dict_alone(kind), issubclass(kind, _RESTLESS)
        if may_be_restless[kind]:
            restless |= find_self_changing(inner_module)
        if not ordinary[kind] or depth > _DEPTH_MAX or "state_dict" in fields or "_save_to_state_dict" in fields:
            return None  # also if only one module of the tree overrides it
        own, buffers, inner = fields.get("_parameters"), fields.get("_buffers"), fields.get("_modules")
        if type(own) is not dict or type(buffers) is not dict or type(inner) is not dict:
            return None
        if fields.get("_state_dict_hooks", True) or fields.get("_state_dict_pre_hooks", True):
            return None
        for name, value in own.items():
            if value is not None:
                if "." in name:
                    return None  # torch does not allow this; state_dict() shows what results
                keys.append(prefix + name)
                names.append(bare + name)
                values.append(value)
                parameters.append(True)
        for name, value in buffers.items() if buffers else ():
            if value is not None and name not in fields["_non_persistent_buffers_set"]:
                if "." in name:
                    return None
                keys.append(prefix + name)
                names.append(bare + name)
                values.append(value)
                parameters.append(False)
        for name, child in reversed(inner.items()) if inner else ():
            if child is not None:
                if "." in name:
                    return None
                waiting.append((child, f"{prefix}{name}.", bare if name in WRAPPERS else f"{bare}{name}.", depth + 1))
    kinds = set(map(type, values))
    if len(set(keys)) < len(keys) or not all(issubclass(kind, torch.Tensor) for kind in kinds):
        return None
    return ModuleTree(keys, names, values, parameters, kinds <= DENSE_TYPES, frozenset(restless))


_RESTLESS = (torch.nn.Embedding, torch.nn.EmbeddingBag, torch.optim.swa_utils.AveragedModel)


def find_self_changing(module: torch.nn.Module) -> set[int]:
    """Ids of the parameters of one module that its own methods change, in a forward pass or by averaging. For example,
    `max_norm` renormalises rows of an embedding whenever they are looked up.
    """
    if isinstance(module, torch.optim.swa_utils.AveragedModel):
        return set(map(id, module.parameters()))
    return {id(module.weight)} if isinstance(module, _RESTLESS) and module.max_norm is not None else set()


def _leaves_state_dict_alone(kind: type) -> bool:
    methods = all(getattr(kind, name, None) is getattr(torch.nn.Module, name) for name in _METHODS)
    return methods and not any(hasattr(kind, name) for name in _TABLES)
