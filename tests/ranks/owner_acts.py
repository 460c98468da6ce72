"""Functions for tests of which thread sets which attribute."""

from __future__ import annotations

import threading
from unittest import mock

import torch
from acts import opened, outcome

from flowstone.codecs.unmatched_rules import UnmatchedRules
from flowstone.coordination.rank_zero import RankZero
from flowstone.coordination.save_coordinator import SaveCoordinator
from flowstone.errors import FlowstoneError
from flowstone.ranks import Agreement


class _Owned(SaveCoordinator):
    """Knows which threads have set each attribute since it was made, by what their names begin with."""

    def __init__(self, agreement: Agreement, host: str, unmatched: UnmatchedRules | None = None) -> None:
        super().__init__(agreement, host, unmatched)
        vars(self)["owners"] = {}

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if "owners" in vars(self):
            vars(self)["owners"].setdefault(name, set()).add(threading.current_thread().name.partition("_")[0])


def saves_of_all_kinds(rank: int, path: str) -> dict[str, list[str]]:
    """Saves that are committed, that fail as they are published, that are refused, of other layouts; and a load.

    The threads that have set each attribute.
    """
    torch.manual_seed(0)
    state: dict[str, object] = {"model": torch.nn.Linear(512, 512)}
    with (
        mock.patch("flowstone.save.conductor.SaveCoordinator", _Owned),
        opened(path, on_error="continue") as saver,
    ):
        for step in range(1, 13):
            if step in (4, 7):
                state[f"layer{step}"] = torch.nn.Linear(8, 8)
            if step in (5, 8):
                refused = outcome(saver, step, {**state, "lock": threading.Lock()})
                assert isinstance(refused, FlowstoneError)
                continue
            full = mock.patch.object(RankZero, "commit", side_effect=OSError("full") if step % 3 == 0 else None)
            with full if step % 3 == 0 else mock.patch.dict({}):
                failed = saver.save(step, state).committed.exception(60)
            assert (failed is not None) == (step % 3 == 0), (step, failed)
        saver.load(state)
        coordinator = saver._saves._coordinator
    return {name: sorted(threads) for name, threads in vars(coordinator)["owners"].items()}
