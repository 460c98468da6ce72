"""Modules and optimizers that are made from state dicts, and contain the tensors of these dicts."""

from __future__ import annotations

from typing import Any, cast

import torch

_RUNNING = frozenset({"running_mean", "running_var", "num_batches_tracked"})  # buffers that differ between ranks


class StateDictModule(torch.nn.Module):
    """A module that holds given tensors under their names, and computes nothing."""

    def put_tensor(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Add a tensor, as a buffer if the last part of its name is in `_RUNNING`, else as a parameter. Returns the
        buffer or parameter.
        """
        owner, leaf = self.submodule(name)
        if leaf in _RUNNING:
            owner._buffers[leaf] = value.detach()
            return value
        # The table is changed directly, as register_parameter() refuses names that are attributes of a module.
        owner._parameters[leaf] = parameter = torch.nn.Parameter(value.detach(), requires_grad=False)
        return parameter

    def put_extra_state(self, name: str, value: object) -> ExtraStateModule:
        """Add the result of a module's get_extra_state(). `name` ends with torch's key for it."""
        owner, _ = self.submodule(name, of=ExtraStateModule)
        extra = cast("ExtraStateModule", owner)
        extra.set_extra_state(value)
        return extra

    def submodule(self, name: str, of: type[StateDictModule] | None = None) -> tuple[StateDictModule, str]:
        """The module that contains the entry with the dotted `name`, and the last part of that name. If the module does
        not exist, it is created, as an object of class `of`.
        """
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
    """A StateDictModule that also has extra state, the result of a module's get_extra_state()."""

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

    complete  whether torch needs all entries to read the state dict back. If so, a checkpoint that lacks an entry does
              not match; otherwise a load removes entries that the checkpoint lacks
    numbered  whether parameters are only known by their numbers, so that their shapes are unknown
    """

    complete = False
    numbered = False
