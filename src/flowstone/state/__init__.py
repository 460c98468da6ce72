"""The state layer: converts between the user's objects and named pieces of memory plus plain objects.

`describe` takes a state apart for a save. `prepare` finds the target memory for a load; the Restoration that it returns
then restores everything that is not tensor bytes.

Every value has one kind. `registry.py` is the table of kinds, `kinds/` has one file for each with both directions side
by side, and `walk.py` is the one recursion that goes through a state. Kinds write into the object of the current pass
(`scan.py`, `saving.py`, `loading.py`); tensors go into the sink (`sink.py`) as columns. An object of a registered type,
or a tensor that is made of tensors, is described by its Provider: `provider.py` is the protocol, `providers.py` finds
the provider of a type, `provider_session.py` checks that a provider keeps its contract, `split.py` is the provider of
tensor subclasses. docs/decisions/007 says why there are two mechanisms.

A flattened tensor is a range of elements (`flat.py`), which is converted to boxes when it enters the sink. `fsdp.py`
reads such ranges from FSDP1's tables, `Flat` declares them. `fsdp2.py` finds the shards of a module whose parameters
are gathered. For an optimizer, a flat parameter stands for all parameters in it: `optimizer_view.Member` says where
each is. `zero.py` finds the state of a ZeroRedundancyOptimizer.
"""

from flowstone.state.counters import CounterCheck, Counters
from flowstone.state.describe import describe
from flowstone.state.flat import Flat
from flowstone.state.frozen import Frozen
from flowstone.state.inner import takes_hook
from flowstone.state.kinds.generator import rng
from flowstone.state.kinds.plain import BYTES_INLINE_MAX
from flowstone.state.provider import ObjectPart, Part, Provider
from flowstone.state.providers import Registration
from flowstone.state.records import Described, Difference, PerRank, Shard, Stored, StoredTensor
from flowstone.state.registry import register_provider
from flowstone.state.restore import Restoration, prepare
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
    "prepare",
    "register_provider",
    "rng",
    "takes_hook",
    "warn_of_load",
    "warn_of_save",
    "wrapped_sections",
]
