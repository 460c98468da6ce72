"""The state layer: what the user hands over <-> named pieces of memory and plain objects.

`describe` takes a state apart for a save; `prepare` finds the places for a load, and the
Restoration that it returns finishes what bytes alone cannot restore.
"""

from flowstone.state.describe import BYTES_INLINE_MAX, describe
from flowstone.state.flat import Flat
from flowstone.state.generators import rng
from flowstone.state.provider import ObjectPart, Part, Provider
from flowstone.state.records import Described, Difference, PerRank, Shard, Stored, StoredTensor
from flowstone.state.registry import Registration, register_provider
from flowstone.state.restore import Restoration, prepare
from flowstone.state.split import SplitTensor
from flowstone.state.survey import collector_paused

__all__ = [
    "BYTES_INLINE_MAX",
    "Described",
    "Difference",
    "Flat",
    "ObjectPart",
    "Part",
    "PerRank",
    "Provider",
    "Registration",
    "Restoration",
    "Shard",
    "SplitTensor",
    "Stored",
    "StoredTensor",
    "collector_paused",
    "describe",
    "prepare",
    "register_provider",
    "rng",
]
