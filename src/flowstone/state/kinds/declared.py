"""Wrappers that users put around values in a state: `fs.PerRank`, around a section (a value at the top of the state)
that differs between ranks, and `fs.Shard`, around a tensor that is only a box (region) of a larger tensor.

`describe` and `prepare` unwrap a PerRank that is a section. At any other place of a state, a PerRank is refused.
"""

from __future__ import annotations

from typing import NoReturn, cast

import numpy as np

from flowstone.format.objects import TensorRef, unsupported_error
from flowstone.state import records
from flowstone.state.kind import ValueKind
from flowstone.state.loading import RestorePass
from flowstone.state.names import Place, check_shared
from flowstone.state.records import RestorePhase
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan, global_name
from flowstone.state.sink import TensorRole


class PerRankKind(ValueKind):
    """A PerRank that is not a section of the state; it is refused."""

    bases = (records.PerRank,)

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        _refuse(value, place)

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> object:
        _refuse(value, place)

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> None:
        _refuse(value, place)


def _refuse(value: object, place: Place) -> NoReturn:
    raise unsupported_error(
        place.name, value, "is inside of another value, but must be at the top of the state",
        "make it an entry of its own there",
    )


class ShardKind(ValueKind):
    """A Shard: a tensor or an array that is a box (a region) of a larger one."""

    bases = (records.Shard,)

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        shard = cast("records.Shard", value)
        check_shared(place, shard)
        if not isinstance(shard.tensor, np.ndarray):
            scan.tensors.append((place, None, [shard.tensor]))
            scan.shards[global_name(place)] = shard
        return True

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> TensorRef:
        shard = cast("records.Shard", value)
        if not isinstance(shard.tensor, np.ndarray):
            saving.sink.enter(place, shard.tensor, within=shard, role=role)
            return TensorRef(place.name, "tensor")
        saving.sink.add_array(place, shard.tensor, within=shard, role=role)
        return TensorRef(place.name, "ndarray")

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> None:
        shard = cast("records.Shard", value)
        if not isinstance(shard.tensor, np.ndarray):
            loading.request_tensor(shard.tensor, node, place, within=shard)
            return
        replacement = loading.request_array(shard.tensor, node, place, within=shard)
        if replacement is not None:
            loading.defer(RestorePhase.VALUES, lambda: shard.replace_array(cast("np.ndarray", replacement())))
