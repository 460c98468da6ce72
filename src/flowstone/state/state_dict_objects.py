"""Modules and optimizers that hold the tensors of state dicts, in place of the objects that the dicts came from."""

from __future__ import annotations

from typing import Any, cast

import torch

_RUNNING = frozenset({"running_mean", "running_var", "num_batches_tracked"})  # which every rank has its own of


class StateDictModule(torch.nn.Module):
    """A module that holds given tensors under their names, and computes nothing."""

    def put_tensor(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Keep a tensor: as a buffer, if it is one that every rank has its own of; else as a parameter, returned."""
        owner, leaf = self.submodule(name)
        if leaf in _RUNNING:
            owner._buffers[leaf] = value.detach()
            return value
        # Into the table itself: register_parameter() refuses names that a module has as attributes.
        owner._parameters[leaf] = parameter = torch.nn.Parameter(value.detach(), requires_grad=False)
        return parameter

    def put_extra_state(self, name: str, value: object) -> ExtraStateModule:
        """Keep what a module's get_extra_state() returned. `name` ends with torch's key for that."""
        owner, _ = self.submodule(name, of=ExtraStateModule)
        extra = cast("ExtraStateModule", owner)
        extra.value = value
        return extra

    def submodule(self, name: str, of: type[StateDictModule] | None = None) -> tuple[StateDictModule, str]:
        """The module that a dotted name leads to, created as an `of` if missing, and the last part of the name."""
        *path, leaf = name.split(".")
        module = self
        for i, part in enumerate(path):
            if part not in module._modules:
                module._modules[part] = StateDictModule()
            if of is not None and i == len(path) - 1:
                module._modules[part] = _with_extra(cast("StateDictModule", module._modules[part]))
            module = cast("StateDictModule", module._modules[part])
        return module, leaf


class ExtraStateModule(StateDictModule):
    """A module of a state dict that has extra state, too."""

    value: object = None

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def _with_extra(module: StateDictModule) -> ExtraStateModule:
    made = ExtraStateModule()
    made._parameters, made._buffers, made._modules = module._parameters, module._buffers, module._modules
    return made


class StateDictOptimizer(torch.optim.Optimizer):
    """An optimizer that holds given slots, and takes no step.

    complete  torch cannot read its state dict back without all entries, so that a checkpoint which lacks one does not
              match; else a load removes what the checkpoint does not have
    numbered  its parameters are known by their order alone, so that nothing is known of their shapes
    """

    complete = False
    numbered = False
