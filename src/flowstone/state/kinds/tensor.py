"""Tensors in plain memory."""

from __future__ import annotations

from typing import cast

import torch

from flowstone.format.objects import TensorRef
from flowstone.state.kind import Kind
from flowstone.state.loading import Loading
from flowstone.state.names import Place
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role
from flowstone.state.tensors import DENSE_TYPES


class Tensor(Kind):
    """A dense tensor. Also tensor types that no other kind recognises: the sink refuses them by name."""

    types = DENSE_TYPES
    bases: tuple[type, ...] = (torch.Tensor,)

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        scan.tensors.append((place, None, [cast("torch.Tensor", value)]))
        return True

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> TensorRef:
        saving.sink.enter(place, cast("torch.Tensor", value), role=role)
        return TensorRef(place.name, "tensor")

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> None:
        loading.into_tensor(cast("torch.Tensor", value), node, place)
