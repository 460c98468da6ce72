"""The expected contents of a checkpoint, found without the library: names and digests of a live state and of files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from format.plain_reader import read
from hostile.states import Accelerated, Warmup

Contents = dict[str, tuple[str, bytes]]
"""By name: a description of the tensor (dtype and shape, or similar), and a digest of its bytes."""

_WRAPPERS = frozenset({"_orig_mod", "module"})
NOT_COMPARED = frozenset({"rng"})  # sections that change by themselves
_COMPARED = (torch.optim.Optimizer, Accelerated, Warmup, torch.Tensor, np.ndarray, dict, list)


def digest(array: np.ndarray) -> tuple[str, bytes]:
    dense = np.ascontiguousarray(array)
    return f"{dense.nbytes}", hashlib.sha1(dense.reshape(-1).view(np.uint8), usedforsecurity=False).digest()


def digest_of(tensor: torch.Tensor) -> tuple[str, bytes]:
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)  # after numpy(), a storage cannot be resized
    return digest(plain.view(-1).view(torch.uint8).numpy() if plain.numel() else np.zeros(0, np.uint8))


def stripped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def contents_of(state: Mapping[str, object]) -> Contents:
    """The expected contents of a checkpoint of `state` that is taken now."""
    contents: Contents = {}
    paths: dict[int, str] = {}
    for section, value in state.items():
        if isinstance(value, nn.Module):
            for name, tensor in value.state_dict(keep_vars=True).items():
                path = f"{section}.{stripped(name)}"
                contents[path] = digest_of(tensor)
                paths.setdefault(id(tensor), path)
    for section, value in state.items():
        if isinstance(value, nn.Module) or not isinstance(value, _COMPARED):
            continue
        inner = value.optimizer if isinstance(value, Accelerated) else value
        if isinstance(inner, torch.optim.Optimizer):
            _add_optimizer(contents, section, inner, paths)
        else:
            _add(contents, section, value)
    return contents


def contents_of_dicts(state: Mapping[str, Any]) -> Contents:
    """The same for a state in which modules and optimizers are state dicts, by name."""
    contents: Contents = {}
    for section, value in state.items():
        if isinstance(value, dict) and "param_groups" in value:
            for name, slots in value["state"].items():
                for slot, content in slots.items():
                    if isinstance(content, torch.Tensor):
                        contents[f"{section}.state.model.{stripped(name)}.{slot}"] = digest_of(content)
        elif section in ("model", "average"):
            contents |= {f"{section}.{stripped(name)}": digest_of(item) for name, item in value.items()}
        elif isinstance(value, _COMPARED):
            _add(contents, section, value)
    return contents


def _add_optimizer(stored: Contents, section: str, optimizer: torch.optim.Optimizer, paths: Mapping[int, str]) -> None:
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                stored[f"{section}.state.{paths[id(parameter)]}.{slot}"] = digest_of(value)


def _add(contents: Contents, name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        contents[name] = digest_of(value)
    elif isinstance(value, Warmup):
        contents[f"{name}.held.generator"] = digest_of(value.generator.get_state())
    elif isinstance(value, np.ndarray):
        contents[name] = digest(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _add(contents, f"{name}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _add(contents, f"{name}.{index}", item)


def contents_on_disk(directory: Path) -> tuple[Contents, Mapping[str, Any]]:
    """The contents of a checkpoint and its objects, by a reader that shares no code with the library."""
    tensors, replicated, _ = read(directory)
    names = [name for name in tensors if name.partition(".")[0].partition("@")[0] not in NOT_COMPARED]
    return {name: digest(tensors[name]) for name in names}, replicated


def differences(expected: Contents, actual: Contents) -> list[str]:
    """The differences from the expected contents, a line each."""
    lines = [f"{name} is missing" for name in expected.keys() - actual.keys()]
    lines += [f"{name} is too much" for name in actual.keys() - expected.keys()]
    lines += [f"{name} differs" for name in expected.keys() & actual.keys() if expected[name] != actual[name]]
    return sorted(lines)
