"""Describe the optimizers of a state, for the header of a journal (the log of each step's gradients)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flowstone.journal.journal_format import OptimizerRow
from flowstone.state.walk import scan
from flowstone.torch.models import StateModels


def optimizer_rows(
    state: Mapping[str, object], optimizers: Sequence[torch.optim.Optimizer], rank: int
) -> tuple[tuple[OptimizerRow, ...], str]:
    """Returns the optimizers, described by the names of their parameters; and why a journal cannot describe them ("" if
    it can).
    """
    parameters = scan(state, rank).part(StateModels).parameters
    rows = []
    for optimizer in optimizers:
        groups = []
        for group in optimizer.param_groups:
            homes = [parameters.home(parameter) for parameter in group["params"]]
            if any(home is None or home.held is not None for home in homes):
                return (), (
                    f"a parameter of {type(optimizer).__name__} is in no module of the state, or this rank has only a "
                    "part of it, and that part is not a DTensor"
                )
            groups.append(tuple(home.path for home in homes if home is not None))
        rows.append(OptimizerRow(type(optimizer).__name__, tuple(groups)))
    return tuple(rows), ""
