"""ZeroRedundancyOptimizer: an optimizer of all parameters, whose state each rank has for some of them.

Only this module uses torch's names for it. Its own state_dict() does not help: it first gathers all ranks' state.
"""

from __future__ import annotations

import torch

from flowstone.errors import UnsupportedStateError
from flowstone.state.imported import imported
from flowstone.state.names import Place


def local_optimizer(optimizer: object, place: Place) -> torch.optim.Optimizer | None:
    """The optimizer that does this rank's part of a ZeroRedundancyOptimizer's work; None for any other optimizer.

    Its groups are parallel to the whole optimizer's, and contain the parameters whose state this rank has.
    """
    known = imported("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    if known is None or not isinstance(optimizer, known):
        return None
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise UnsupportedStateError(
            f"'{place.name}' steps inside of backward, without waiting for what is not captured yet",
            found="a ZeroRedundancyOptimizer with overlap_with_ddp=True", next="construct it without overlap_with_ddp",
        )
    local = getattr(optimizer, "optim", None)
    if not isinstance(local, torch.optim.Optimizer) or len(local.param_groups) != len(optimizer.param_groups):
        raise UnsupportedStateError(
            f"'{place.name}' has an unknown structure", expected="a local optimizer of as many groups, called 'optim'",
            found=f"the ZeroRedundancyOptimizer of torch {torch.__version__}",
            next="use torch 2.13",
        )
    return local
