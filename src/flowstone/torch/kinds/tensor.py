"""Tensors in plain memory, tensors that consist of tensors, DTensors, and `fs.Flat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from flowstone.format.objects import TensorRef
from flowstone.providers.provided_kind import ProvidedKind
from flowstone.state.kind import ValueKind
from flowstone.state.loading import RestorePass
from flowstone.state.names import Place, check_shared
from flowstone.state.nodes import describe_node
from flowstone.state.provider_registry import ProviderEntry
from flowstone.state.records import MISSING
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole
from flowstone.torch import flat
from flowstone.torch.models import StateModels
from flowstone.torch.shards import is_dtensor, shards_of
from flowstone.torch.tensor_subclasses import find_subclass_provider
from flowstone.torch.tensors import DENSE_TYPES


class TensorKind(ValueKind):
    """A dense tensor. Also a tensor of a type that no other kind recognises, which the sink (the collector of the
    state's tensors) refuses with an error that names it.
    """

    types = DENSE_TYPES
    bases: tuple[type, ...] = (torch.Tensor,)

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        scan.tensors.append((place, None, [cast("torch.Tensor", value)]))
        return True

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> TensorRef:
        saving.sink.enter(place, cast("torch.Tensor", value), role=role)
        return TensorRef(place.name, "tensor")

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> None:
        loading.request_tensor(cast("torch.Tensor", value), node, place)


class TensorSubclassKind(ProvidedKind):
    """A tensor of a type with `__tensor_flatten__`."""

    def find_provider(self, value: object) -> ProviderEntry | None:
        return find_subclass_provider(type(value))


if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor


class DTensorKind(TensorKind):
    """A DTensor, of which each rank has some boxes (regions)."""

    types = frozenset()
    bases = ()

    def recognises(self, value: object) -> bool:
        return is_dtensor(value)

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> TensorRef:
        tensor = cast("TorchDTensor", value)
        saving.sink.enter_boxes(place, shards_of(tensor, place.name), tensor, role)
        return TensorRef(place.name, "tensor")

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> None:
        tensor = cast("TorchDTensor", value)
        loading.request_boxes(tensor, shards_of(tensor, place.name), node, place)


class FlatKind(ValueKind):
    """A Flat: a flat tensor. The tensors in it are stored, each by its own name."""

    bases = (flat.Flat,)

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        check_shared(place, value)
        scan.part(StateModels).flats.append((place, cast("flat.Flat", value)))
        return True

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> dict[str, object]:
        """Add the members to the save. Their names identify them, so they need not be listed in the stored form."""
        declared = cast("flat.Flat", value)
        role = TensorRole.STEPPED if id(declared.tensor) in saving.stepped else role
        for span in declared.spans:
            inner = place.called(f"{place.name}.{span.name}", span.name)
            saving.sink.enter(inner, span.slice_of(declared.tensor), within=span.range, role=role)
        return {}

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> None:
        declared = cast("flat.Flat", value)
        if node is not MISSING and not isinstance(node, dict):
            loading.add_difference("kind", place.name, "a flat tensor's members", describe_node(node))
            return
        for span in declared.spans:
            inner = place.called(f"{place.name}.{span.name}", span.name)
            loading.request_tensor(span.slice_of(declared.tensor), MISSING, inner, within=span.range)
        names = {span.name for span in declared.spans}
        loading.add_unexpected(node if isinstance(node, dict) else {}, names, place)
