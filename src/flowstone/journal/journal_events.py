"""Typed records of journals (`every_step`), which a Checkpointer passes to its `on_event`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Journaled:
    """This step is durable: the journal can replay it (`every_step`).

    uncompressed  why gradients that training exchanges in compressed form were logged uncompressed; "" if all such
                  gradients were logged compressed
    synced        how many steps, including this one, became durable with the same sync; up to `lag_steps`
    """

    step: int
    bytes: int
    seconds: float  # since `save` was called
    uncompressed: str = ""
    synced: int = 1


@dataclass(frozen=True, slots=True)
class NotJournaled:
    """With `every_step`: a replay could not repeat this step's changes, so the step is saved as a full checkpoint. In a
    job of several ranks, this step is dropped, and the next one is saved as a full checkpoint.
    """

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """After the checkpoint of step `base`, a load has replayed later steps from the journal. See LoadReport.replay."""

    base: int
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NotReplayed:
    """The journal has newer steps than the loaded checkpoint, but cannot be replayed here."""

    base: int
    newest: int
    reason: str


JournalEvent = Journaled | NotJournaled | Replayed | NotReplayed
