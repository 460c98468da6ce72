"""Roles of a module's tensors: which of them optimizers of the state step, and which may change at any time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch

from flowstone.state.sink import Role


class Roles:
    """The roles of one module's tensors."""

    def __init__(self, stepped: Set[int], restless: Set[int], tensors: Iterable[torch.Tensor]) -> None:
        """`stepped`: ids of tensors that optimizers of the state step; `restless`: of those that also change otherwise.

        Parameters without an optimizer may be frozen if others of the same model are trained. A model without trained
        parameters is a copy that changes in other ways: an average, a teacher, a target.
        """
        self._stepped = stepped - restless
        self._restless = restless
        self._unowned = Role.PARAMETER if stepped.isdisjoint(map(id, tensors)) else Role.UNOWNED

    def of(self, tensor: torch.Tensor, is_parameter: bool) -> Role:
        """The role of one tensor."""
        return self.of_all([tensor], [is_parameter])[0]

    def of_all(self, tensors: Sequence[torch.Tensor], are_parameters: Iterable[bool]) -> list[Role]:
        """The role of each tensor, with few calls for thousands."""
        roles = [
            Role.STEPPED if id(one) in self._stepped else self._unowned if is_parameter else Role.BUFFER
            for one, is_parameter in zip(tensors, are_parameters, strict=True)
        ]
        if self._restless:
            roles = [
                Role.PARAMETER if role is not Role.BUFFER and id(one) in self._restless else role
                for one, role in zip(tensors, roles, strict=True)
            ]
        return roles
