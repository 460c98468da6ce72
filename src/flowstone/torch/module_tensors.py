"""A module's own tensors: its parameters and buffers."""

from __future__ import annotations

import torch

from flowstone.torch import tensors


class ModuleTensors:
    """The tensors of one module, to distinguish them from tensors that its state_dict() creates."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._ids = {id(value) for value in _own_tensors(module)}
        self._memory: dict[tuple[object, ...] | None, torch.Tensor] | None = None

    def has(self, value: object) -> bool:
        """Whether a write into `value` changes the module."""
        return self.own(value) is not None

    def own(self, value: object) -> torch.Tensor | None:
        """The module's tensor that a write into `value` changes."""
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) in self._ids:
            return value
        if tensors.is_uninitialized(value) or type(value) is not torch.Tensor:
            return None
        if self._memory is None:
            # Computed only if state_dict() detaches tensors, as finding all addresses of a module takes time.
            self._memory = {_identity(own): own for own in reversed(_own_tensors(self._module))}
        identity = _identity(value)
        return None if identity is None else self._memory.get(identity)


def _own_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    own: list[torch.Tensor] = []
    for inner in module.modules():
        own.extend(value for value in inner._parameters.values() if value is not None)
        own.extend(value for value in inner._buffers.values() if value is not None)
    return own


def _identity(tensor: torch.Tensor) -> tuple[object, ...] | None:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    try:
        return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    except RuntimeError:  # the tensor is uninitialized, or of a subclass without memory
        return None
