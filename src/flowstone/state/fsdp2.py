"""FSDP2: a module with the shards that its optimizer has, read without changing the module.

A forward or backward pass puts gathered parameters into the module for a while. Its own state_dict() puts the shards
back first, which is fatal to a pass that runs on another thread. A copy of the module's tree has the shards instead.

Only this module uses torch's private names for it (as of torch 2.13).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from flowstone.errors import UnsupportedStateError
from flowstone.state.imported import imported

_HOOK_OF = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def with_shards(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself if FSDP2 manages no parameter in it; else a copy of its tree that shares all tensors and other
    attributes, and whose parameters are the shards. Changes nothing: safe on any thread, during any pass.

    raises  UnsupportedStateError  this torch's tables differ from the known ones
    """
    hooks = {id(hook): hook for _, hook in _hooks(module)}
    if not hooks:
        return module
    shards: dict[int, dict[str, torch.Tensor]] = {}
    for hook in hooks.values():
        for owner, name, shard in _shards(hook):
            shards.setdefault(id(owner), {})[name] = shard
    return _copied(module, shards, {})


def drop_gathered(module: torch.nn.Module) -> None:
    """Put the shards into the module and free what was gathered, as its own load_state_dict() does: after the shards
    have changed, the next forward gathers anew.
    """
    for hook in {id(hook): hook for _, hook in _hooks(module)}.values():
        hook()


def _copied(
    module: torch.nn.Module, shards: Mapping[int, Mapping[str, torch.Tensor]], made: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    """A copy of a module and of all below it. Both mappings are by the originals' ids."""
    copy = made.get(id(module))
    if copy is None:
        made[id(module)] = copy = object.__new__(type(module))
        vars(copy).update(vars(module))
        own = {at for at, _ in _hooks_of(module)}
        vars(copy).update(
            _modules={
                name: None if one is None else _copied(one, shards, made) for name, one in module._modules.items()
            },
            _parameters={**module._parameters, **shards.get(id(module), {})},
            _state_dict_pre_hooks={at: hook for at, hook in module._state_dict_pre_hooks.items() if at not in own},
        )
    return copy


def _hooks(module: torch.nn.Module) -> Iterator[tuple[int, Callable[[], None]]]:
    """The hooks (`_hooks_of`) of a whole tree of modules. Costs nothing if FSDP2 was never imported."""
    if imported("torch.distributed.fsdp", "FSDPModule") is not None:
        for one in module.modules():
            yield from _hooks_of(one)


def _hooks_of(module: torch.nn.Module) -> Iterator[tuple[int, Callable[[], None]]]:
    """The hooks of its state_dict() by which FSDP2 puts the shards back, with their keys: one for each group of
    parameters.
    """
    for at, hook in module._state_dict_pre_hooks.items():
        if getattr(hook, "__module__", None) == _HOOK_OF:
            yield at, hook


def _shards(hook: Callable[[], None]) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Modules, names and shards of the group of parameters that the hook belongs to."""
    try:
        group: Any = inspect.getclosurevars(hook).nonlocals["self"]
        for parameter in group.fsdp_params:
            place = parameter._module_info
            owners = (place.module, *place.shared_modules)
            names = (place.param_name, *place.shared_param_names)
            for owner, name in zip(owners, names, strict=True):
                yield owner, name, parameter.sharded_param
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedStateError(
            f"fully_shard of torch {torch.__version__} has an unknown internal structure", found=f"{error!r:.200}",
            next="install torch 2.13",
        ) from error
