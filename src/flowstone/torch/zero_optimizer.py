"""ZeroRedundancyOptimizer: an optimizer of all parameters, of which each rank has the state of some parameters.

Only this module uses torch's names of this class. Its own state_dict() cannot be used, as it first gathers the state of
all ranks.
"""

from __future__ import annotations

import torch

from flowstone.errors import UnsupportedStateError
from flowstone.state.imported import class_if_imported
from flowstone.state.names import Place


def local_optimizer(optimizer: object, place: Place) -> torch.optim.Optimizer | None:
    """The optimizer that does this rank's part of a ZeroRedundancyOptimizer's work; None for any other optimizer.

    It has as many groups as the outer optimizer, each with those parameters whose state this rank has.
    """
    own_class = class_if_imported("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    if own_class is None or not isinstance(optimizer, own_class):
        return None
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise UnsupportedStateError(
            f"'{place.name}' steps inside of backward() and does not wait until a save is captured",
            found="a ZeroRedundancyOptimizer with overlap_with_ddp=True", next="construct it without overlap_with_ddp",
        )
    local = getattr(optimizer, "optim", None)
    if not isinstance(local, torch.optim.Optimizer) or len(local.param_groups) != len(optimizer.param_groups):
        raise UnsupportedStateError(
            f"'{place.name}' has an unknown structure",
            expected="a local optimizer 'optim' with as many groups as the outer optimizer",
            found=f"the ZeroRedundancyOptimizer of torch {torch.__version__}",
            next="use torch 2.13",
        )
    return local
