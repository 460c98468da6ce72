"""Modules that do more than copy when they are loaded, by an override or a hook."""

from __future__ import annotations

import torch

_TORCH = ("torch.nn.", "torch.distributed.")  # their overrides and hooks of a load serve old versions, and shards


def loads_itself(module: torch.nn.Module) -> bool:
    """Whether a load of the module has to call its load_state_dict()."""
    return has_own_load_state_dict(module) or any(map(own_load, module.modules()))


def has_own_load_state_dict(module: torch.nn.Module) -> bool:
    """Whether the outermost module decides itself what a load does, and what may be missing."""
    return "load_state_dict" in vars(module) or not _is_torchs(type(module).load_state_dict)


def own_load(one: torch.nn.Module) -> bool:
    """Whether a module does more than copy when a load gets to it: by an override, or by a hook."""
    fields = vars(one)
    if "_load_from_state_dict" in fields or not _is_torchs(type(one)._load_from_state_dict):
        return True
    before, after = fields.get("_load_state_dict_pre_hooks"), fields.get("_load_state_dict_post_hooks")
    if not before and not after:
        return False
    return not all(map(_is_torchs, [*(before or {}).values(), *(after or {}).values()]))


def _is_torchs(function: object) -> bool:
    function = getattr(function, "hook", function)  # a pre-hook is in a wrapper
    return (getattr(function, "__module__", None) or type(function).__module__).startswith(_TORCH)
