"""Finds modules whose load does more than copy, by an override or a hook."""

from __future__ import annotations

import torch

_TORCH = ("torch.nn.", "torch.distributed.")  # torch's own overrides and hooks only serve old versions and shards


def loads_itself(module: torch.nn.Module) -> bool:
    """Whether a load must call the module's load_state_dict()."""
    return has_own_load_state_dict(module) or any(map(own_load, module.modules()))


def has_own_load_state_dict(module: torch.nn.Module) -> bool:
    """Whether the outermost module overrides load_state_dict(), which then decides which keys may be missing."""
    return "load_state_dict" in vars(module) or not _is_torchs(type(module).load_state_dict)


def own_load(module: torch.nn.Module) -> bool:
    """Whether a load of this one module does more than copy, by an override or a hook."""
    fields = vars(module)
    if "_load_from_state_dict" in fields or not _is_torchs(type(module)._load_from_state_dict):
        return True
    before, after = fields.get("_load_state_dict_pre_hooks"), fields.get("_load_state_dict_post_hooks")
    if not before and not after:
        return False
    return not all(map(_is_torchs, [*(before or {}).values(), *(after or {}).values()]))


def _is_torchs(function: object) -> bool:
    function = getattr(function, "hook", function)  # torch wraps a pre-hook in an object
    return (getattr(function, "__module__", None) or type(function).__module__).startswith(_TORCH)
