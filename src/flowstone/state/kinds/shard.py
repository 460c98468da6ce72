"""`fs.Shard`: a box of a larger tensor, declared by hand."""

from __future__ import annotations

from typing import cast

import torch

from flowstone.format.objects import TensorRef
from flowstone.state import records
from flowstone.state.kind import Kind
from flowstone.state.loading import Loading
from flowstone.state.names import Place, check_shared
from flowstone.state.records import Phase
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan, global_name
from flowstone.state.sink import Role


class Shard(Kind):
    """A tensor or an array, and its box in a larger one."""

    bases = (records.Shard,)

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        shard = cast("records.Shard", value)
        check_shared(place, shard)
        if isinstance(shard.tensor, torch.Tensor):
            scan.tensors.append((place, None, [shard.tensor]))
            scan.shards[global_name(place)] = shard
        return True

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> TensorRef:
        shard = cast("records.Shard", value)
        if isinstance(shard.tensor, torch.Tensor):
            saving.sink.enter(place, shard.tensor, within=shard, role=role)
            return TensorRef(place.name, "tensor")
        saving.sink.add_array(place, shard.tensor, within=shard, role=role)
        return TensorRef(place.name, "ndarray")

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> None:
        shard = cast("records.Shard", value)
        if isinstance(shard.tensor, torch.Tensor):
            loading.into_tensor(shard.tensor, node, place, within=shard)
            return
        replacement = loading.into_array(shard.tensor, node, place, within=shard)
        if replacement is not None:
            loading.later(Phase.VALUES, lambda: setattr(shard, "tensor", replacement()))
