"""DTensors: their placements on a mesh say which boxes this rank holds (`shards.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from flowstone.format.objects import TensorRef
from flowstone.state.kinds.tensor import Tensor
from flowstone.state.loading import Loading
from flowstone.state.names import Place
from flowstone.state.saving import Saving
from flowstone.state.shards import is_dtensor, shards_of
from flowstone.state.sink import Role

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor


class DTensor(Tensor):
    """A tensor of which each rank holds boxes."""

    types = frozenset()
    bases = ()

    def recognises(self, value: object) -> bool:
        return is_dtensor(value)

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> TensorRef:
        tensor = cast("TorchDTensor", value)
        saving.sink.enter_boxes(place, shards_of(tensor, place.name), tensor, role)
        return TensorRef(place.name, "tensor")

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> None:
        tensor = cast("TorchDTensor", value)
        loading.into_boxes(tensor, shards_of(tensor, place.name), node, place)
