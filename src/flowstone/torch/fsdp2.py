"""FSDP2: reads the shards of a module's parameters (the tensors that its optimizer has) without changing the module.

A forward or backward pass temporarily puts gathered parameters into the module. The module's own state_dict() first
puts the shards back, which would break a pass on another thread. So the shards are put into a copy of the module's
tree.

Only this module uses torch's private names of FSDP2 (as of torch 2.13).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from flowstone.errors import UnsupportedStateError
from flowstone.state.imported import class_if_imported

_HOOK_OF = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def with_shards(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself if FSDP2 manages no parameter in it; otherwise a copy of its tree that shares all tensors and
    other attributes, but with shards as parameters. Changes nothing: safe on any thread, during any pass.

    raises  UnsupportedStateError  the private objects in which FSDP2 keeps a module's shards have other attributes in
                                   this version of torch than in torch 2.13
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
    """Put the shards into the module and free gathered parameters, as the module's own load_state_dict() does. Must be
    called after the shards have changed; the next forward then gathers them again.
    """
    for hook in {id(hook): hook for _, hook in _hooks(module)}.values():
        hook()


def _copied(
    module: torch.nn.Module, shards: Mapping[int, Mapping[str, torch.Tensor]], made: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    """A copy of a module and of all modules inside of it, with shards as parameters. Keys of `shards` and `made` are
    ids of original modules.
    """
    copy = made.get(id(module))
    if copy is None:
        made[id(module)] = copy = object.__new__(type(module))
        vars(copy).update(vars(module))
        own = {key for key, _ in _hooks_of(module)}
        vars(copy).update(
            _modules={
                name: None if inner is None else _copied(inner, shards, made) for name, inner in module._modules.items()
            },
            _parameters={**module._parameters, **shards.get(id(module), {})},
            _state_dict_pre_hooks={key: hook for key, hook in module._state_dict_pre_hooks.items() if key not in own},
        )
    return copy


def _hooks(module: torch.nn.Module) -> Iterator[tuple[int, Callable[[], None]]]:
    """The hooks of FSDP2 (`_hooks_of`) in a module and all modules inside. Costs nothing if FSDP2 was never imported.
    """
    if class_if_imported("torch.distributed.fsdp", "FSDPModule") is not None:
        for inner in module.modules():
            yield from _hooks_of(inner)


def _hooks_of(module: torch.nn.Module) -> Iterator[tuple[int, Callable[[], None]]]:
    """The state_dict() hooks by which FSDP2 puts shards back, with their keys: one hook for each group of parameters.
    """
    for key, hook in module._state_dict_pre_hooks.items():
        if getattr(hook, "__module__", None) == _HOOK_OF:
            yield key, hook


def _shards(hook: Callable[[], None]) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Yield module, name and shard for each parameter of the group to which FSDP2's hook belongs."""
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
