"""Roles of a module's tensors: which tensors the state's optimizers step, and which may change at any time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch

from flowstone.state.sink import TensorRole


class ModuleRoles:
    """The roles of one module's tensors."""

    def __init__(self, stepped: Set[int], restless: Set[int], tensors: Iterable[torch.Tensor]) -> None:
        """`stepped`: ids of tensors that the state's optimizers change in their steps. `restless`: ids of tensors that
        also change without a step.

        If some parameters of a model are trained, those without an optimizer may be frozen. A model without any trained
        parameter is taken for a copy that changes in other ways: an average, a teacher, a target.
        """
        self._stepped = stepped - restless
        self._restless = restless
        self._unowned = TensorRole.PARAMETER if stepped.isdisjoint(map(id, tensors)) else TensorRole.UNOWNED

    def role_of(self, tensor: torch.Tensor, is_parameter: bool) -> TensorRole:
        """The role of one tensor."""
        return self.roles_of([tensor], [is_parameter])[0]

    def roles_of(self, tensors: Sequence[torch.Tensor], are_parameters: Iterable[bool]) -> list[TensorRole]:
        """The role of each tensor, with few calls for thousands."""
        roles = [
            TensorRole.STEPPED if id(tensor) in self._stepped else self._unowned if is_parameter else TensorRole.BUFFER
            for tensor, is_parameter in zip(tensors, are_parameters, strict=True)
        ]
        if self._restless:
            roles = [
                TensorRole.PARAMETER if role is not TensorRole.BUFFER and id(tensor) in self._restless else role
                for tensor, role in zip(tensors, roles, strict=True)
            ]
        return roles
