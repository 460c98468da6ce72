"""What a checkpoint has to hold, found without the library: names and digests of a live state, and of files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from format.plain_reader import read
from torch import nn

from hostile.states import Accelerated, Warmup

Contents = dict[str, tuple[str, bytes]]
"""By name: what a tensor is (dtype and shape, or what stands for them), and a digest of its bytes."""

_WRAPPERS = frozenset({"_orig_mod", "module"})
NOT_COMPARED = frozenset({"rng"})  # sections that move by themselves
_COMPARED = (torch.optim.Optimizer, Accelerated, Warmup, torch.Tensor, np.ndarray, dict, list)


def digest(array: np.ndarray) -> tuple[str, bytes]:
    dense = np.ascontiguousarray(array)
    return f"{dense.nbytes}", hashlib.sha1(dense.reshape(-1).view(np.uint8), usedforsecurity=False).digest()


def digest_of(tensor: torch.Tensor) -> tuple[str, bytes]:
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)  # numpy() ends that a storage can be resized
    return digest(plain.view(-1).view(torch.uint8).numpy() if plain.numel() else np.zeros(0, np.uint8))


def stripped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def contents_of(state: Mapping[str, object]) -> Contents:
    """What a checkpoint of `state` has to hold, if it is taken now."""
    found: Contents = {}
    paths: dict[int, str] = {}
    for section, value in state.items():
        if isinstance(value, nn.Module):
            for name, tensor in value.state_dict(keep_vars=True).items():
                path = f"{section}.{stripped(name)}"
                found[path] = digest_of(tensor)
                paths.setdefault(id(tensor), path)
    for section, value in state.items():
        if isinstance(value, nn.Module) or not isinstance(value, _COMPARED):
            continue
        inner = value.optimizer if isinstance(value, Accelerated) else value
        if isinstance(inner, torch.optim.Optimizer):
            _add_optimizer(found, section, inner, paths)
        else:
            _add(found, section, value)
    return found


def contents_of_dicts(state: Mapping[str, Any]) -> Contents:
    """The same of a state in which modules and optimizers are state dicts, by name."""
    found: Contents = {}
    for section, value in state.items():
        if isinstance(value, dict) and "param_groups" in value:
            for name, slots in value["state"].items():
                for slot, one in slots.items():
                    if isinstance(one, torch.Tensor):
                        found[f"{section}.state.model.{stripped(name)}.{slot}"] = digest_of(one)
        elif section in ("model", "average"):
            found |= {f"{section}.{stripped(name)}": digest_of(one) for name, one in value.items()}
        elif isinstance(value, _COMPARED):
            _add(found, section, value)
    return found


def _add_optimizer(found: Contents, section: str, optimizer: torch.optim.Optimizer, paths: Mapping[int, str]) -> None:
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                found[f"{section}.state.{paths[id(parameter)]}.{slot}"] = digest_of(value)


def _add(found: Contents, name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = digest_of(value)
    elif isinstance(value, Warmup):
        found[f"{name}.held.generator"] = digest_of(value.generator.get_state())
    elif isinstance(value, np.ndarray):
        found[name] = digest(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _add(found, f"{name}.{key}", item)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            _add(found, f"{name}.{at}", item)


def contents_on_disk(directory: Path) -> tuple[Contents, Mapping[str, Any]]:
    """What a checkpoint holds, by a reader that shares no code with the library; and its objects."""
    tensors, replicated, _ = read(directory)
    names = [name for name in tensors if name.partition(".")[0].partition("@")[0] not in NOT_COMPARED]
    return {name: digest(tensors[name]) for name in names}, replicated


def differences(wanted: Contents, found: Contents) -> list[str]:
    """What is not as it has to be, a line each."""
    lines = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    lines += [f"{name} is too much" for name in found.keys() - wanted.keys()]
    lines += [f"{name} differs" for name in wanted.keys() & found.keys() if wanted[name] != found[name]]
    return sorted(lines)
