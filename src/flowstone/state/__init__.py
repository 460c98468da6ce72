"""The state layer: what the user hands over <-> named pieces of memory and plain objects.

`describe` takes a state apart for a save; `prepare` finds the places for a load, and the
Restoration that it returns finishes what bytes alone cannot restore.

Every value has one kind (`kinds.py`, `scan.classify`). Modules, optimizers, generators, loaders and plain trees are
described by the walk itself, which enters tensors into the collector by columns; an object of a registered type, or a
tensor that is made of tensors, by its Provider: `provider.py` is the protocol, `registry.py` who serves which type,
`provider_session.py` holds a provider to its contract, `provider_adapter.py` joins it to the walk, `split.py` is the
provider of tensor subclasses. Why there are two ways: docs/decisions/007.

A flattened tensor is a range of elements (`flat.py`), cut into boxes as it enters the collector. `fsdp.py` reads such
ranges from FSDP1's tables, `Flat` declares them. To the optimizer's half of the walk a flat parameter is all that lies
in it: `optimizers.Member` says where. `zero.py` knows who keeps the state of a ZeroRedundancyOptimizer.
"""

from flowstone.state.counters import CounterCheck, Counters
from flowstone.state.describe import BYTES_INLINE_MAX, describe
from flowstone.state.flat import Flat
from flowstone.state.frozen import Frozen
from flowstone.state.generators import rng
from flowstone.state.inner import takes_hook
from flowstone.state.provider import ObjectPart, Part, Provider
from flowstone.state.records import Described, Difference, PerRank, Shard, Stored, StoredTensor
from flowstone.state.registry import Registration, register_provider
from flowstone.state.restore import Restoration, prepare
from flowstone.state.scan import gc_paused
from flowstone.state.split import SplitTensor
from flowstone.state.state_dicts import found_in, warn_of_load, warn_of_save, wrapped_sections

__all__ = [
    "BYTES_INLINE_MAX",
    "CounterCheck",
    "Counters",
    "Described",
    "Difference",
    "Flat",
    "Frozen",
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
    "describe",
    "found_in",
    "gc_paused",
    "prepare",
    "register_provider",
    "rng",
    "takes_hook",
    "warn_of_load",
    "warn_of_save",
    "wrapped_sections",
]
