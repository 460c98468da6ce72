"""The state layer: converts between the user's objects and named pieces of memory plus plain objects.

`describe` takes a state apart for a save. `prepare` finds the target memory for a load; the Restoration that `prepare`
returns then restores everything that is not tensor bytes.

Each value of a state is of one kind, such as module, optimizer or container. `registry.py` is the table of kinds.
`kinds/` has a file for each kind, with the code for saves and for loads. `walk.py` is the one recursion over a state.
Kinds write what they find into the object of the current pass (`scan.py`, `saving.py`, `loading.py`); tensors are
collected in the sink (`sink.py`). An object of a registered type, or a tensor that consists of tensors, is described by
its Provider: `provider_registry.py` finds it, and the folder `providers/` has the rest.
docs/decisions/007 says why there are both kinds and providers.

The following is in `torch/`. A part of a flattened tensor is a range of elements (`flat.py`), which is converted to
boxes (regions of tensors) when it is added to the sink. `fsdp1.py` reads such ranges from FSDP1's tables; users declare
them with `Flat`. `fsdp2.py` finds the shards of a module whose parameters are gathered. For an optimizer, a flat
parameter stands for all parameters in it; `optimizer_view.ParameterMember` says where each of these is. "Slots" are an
optimizer's values for one parameter, such as `exp_avg`. `zero_optimizer.py` finds the state of a
ZeroRedundancyOptimizer.
"""

from flowstone.state.counters import VersionCheck, VersionCounters
from flowstone.state.describe import describe
from flowstone.state.frozen import FrozenParameters
from flowstone.state.kinds.plain import BYTES_INLINE_MAX
from flowstone.state.records import PerRank, Shard, StateDescription, StateDifference, StoredState, TensorSpec
from flowstone.state.restore import Restoration, prepare
from flowstone.state.state_dicts import (
    find_state_dicts,
    warn_state_dict_loaded,
    warn_state_dict_saved,
    wrapped_sections,
)

__all__ = [
    "BYTES_INLINE_MAX",
    "VersionCheck",
    "VersionCounters",
    "StateDescription",
    "StateDifference",
    "FrozenParameters",
    "PerRank",
    "Restoration",
    "Shard",
    "StoredState",
    "TensorSpec",
    "describe",
    "find_state_dicts",
    "prepare",
    "warn_state_dict_loaded",
    "warn_state_dict_saved",
    "wrapped_sections",
]
