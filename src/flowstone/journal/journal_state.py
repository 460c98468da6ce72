"""Whether the next save can be journaled: the three states Empty, Open and Broken, used on the caller's thread.

    Empty   --a full save, or a load-->   Open     the next step can go into a journal
    Open    --a step is journaled-->      Open     `Open.advanced`
    Open    --a step cannot be replayed, or a save fails-->   Empty, or Broken with the reason   `without_baseline`
    Broken  --a full save-->              Open
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from flowstone.journal.journal_baseline import JournalBaseline
from flowstone.journal.journal_records import Lineage
from flowstone.journal.optimizer_steps import OptimizerStepRecord


class Empty(msgspec.Struct, frozen=True):
    """There is no earlier step that a journal could continue from. The next save is full."""


class Broken(msgspec.Struct, frozen=True):
    """The next save cannot be journaled: it is full, and an event reports the reason."""

    reason: str


class Open(msgspec.Struct, frozen=True, eq=False):
    """The next step can be journaled.

    lineage       step of the last save or load, and the checkpoint or journal with it
    baseline      the state that the next journal frame builds on
    replay_s      expected duration, in seconds, of a replay of the steps since the checkpoint
    replay_bytes  bytes that this replay reads
    """

    lineage: Lineage
    baseline: JournalBaseline
    replay_s: float = 0.0
    replay_bytes: int = 0

    def advanced(self, step: int, records: Sequence[OptimizerStepRecord], journal: str | None) -> Open:
        """This state, advanced to `step`, which was appended to `journal` with these optimizer steps."""
        return replace(
            self, lineage=Lineage(step, None, journal),
            replay_s=self.replay_s + sum(record.seconds for record in records),
            replay_bytes=self.replay_bytes + sum(record.gradient_bytes for record in records),
        )


JournalState: TypeAlias = Empty | Open | Broken


def without_baseline(state: JournalState, reason: str = "") -> Empty | Broken:
    """The state after an error, when the next step cannot build on the last one. `reason`: why; "" keeps the earlier
    reason.
    """
    reason = reason or (state.reason if isinstance(state, Broken) else "")
    return Broken(reason) if reason else Empty()
