"""Typed records of journals (`every_step`), which a Checkpointer passes to its `on_event` as well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Journaled:
    """This step is durable: the journal has what replays it (`every_step`).

    uncompressed  why gradients were logged as they are, though training exchanges them compressed; "" if none were
    synced        how many steps, this one among them, became durable by one sync; up to `lag_steps`
    """

    step: int
    bytes: int
    seconds: float  # since `save` was called
    uncompressed: str = ""
    synced: int = 1


@dataclass(frozen=True, slots=True)
class NotJournaled:
    """With `every_step`: what has changed since the step before cannot be replayed, so this step is saved whole; in a
    job of several ranks it is given up, and the next one is saved whole.
    """

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """A load has replayed the steps after a checkpoint's, from the journal. See LoadReport.replay."""

    base: int
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NotReplayed:
    """The journal leads from the checkpoint that was loaded to a newer step, but cannot be replayed here."""

    base: int
    newest: int
    reason: str


JournalEvent = Journaled | NotJournaled | Replayed | NotReplayed
