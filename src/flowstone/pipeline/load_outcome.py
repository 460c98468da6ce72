"""What a load did, for its caller, and what it leaves for the next save to check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.errors import DamagedError
from flowstone.format.manifest import LossyRow


class VerifiedRead(msgspec.Struct, frozen=True, eq=False):
    """What a load has read of a checkpoint, and found to be what was written.

    step, id  of the checkpoint
    chunks    for each chunk of its index whether it was read; packed bits
    stamps    of the files that a later save of this rank may refer to, by name; taken before the first byte was read
    """

    step: int
    id: str
    chunks: NDArray[np.uint8]
    stamps: Mapping[str, str | None]


class LoadOutcome(msgspec.Struct, eq=False):
    """The outcome of the loads of one Checkpointer, most of it of the last one.

    unfinished        the reason why the state must not be saved: a load changed a part of it and did not finish
    superseded_above  a load fell back to this step: the next save sets newer steps aside
    loads             how many have begun to read
    verified          what the last one has read, if it succeeded
    """

    unfinished: str | None = None
    superseded_above: int | None = None
    loads: int = 0
    verified: VerifiedRead | None = None

    def check_whole(self) -> None:
        """Raise DamagedError if a part of the state may be from another step than the rest."""
        if self.unfinished is not None:
            raise DamagedError(
                f"cannot save the state: {self.unfinished}, and part of the state has changed",
                next="load a checkpoint successfully first",
            )


@dataclass(frozen=True, slots=True)
class Replay:
    """The steps that a load has replayed.

    base       the step of the checkpoint that was read
    steps      how many were replayed
    newest     to which step the journal leads; above the report's step if not all could be replayed
    exactness  "exact": the steps are proven to be bit for bit what they were, by fingerprints that cover all tensors of
               the optimizers, and frozen ones, once in eight steps. "tolerance": torch or the processor differ from
               those of the steps, or some of the state was on a device, and `differs_from` is the first step of which
               a fingerprint differs, None if none does; or a device could not digest its memory
    reason     why not all were replayed, "" if all were
    approximate  sections that are near to what they were, and not the same: residuals of compressed gradients, whatever
               `exactness` says of all else
    """

    base: int
    steps: int
    newest: int
    exactness: str
    differs_from: int | None
    reason: str
    seconds: float
    bytes: int
    approximate: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    matched      names of the tensors that were read
    initialised  in the state, not in the checkpoint, left as they were (Init)
    skipped      in the checkpoint, not in the state (Skip)
    cast         converted from another dtype (Cast)
    renamed      stored name and name in the state, if they differ (Rename)
    notes        remarks on anything unusual; on rank 0 also that durable steps of a journal behind this one are lost
    bytes        length of the chunks that this rank has read
    shared_bytes length of the chunks that it took from shared reads on its node, including those that it read itself
    rearranged   name in the state, and the stored tensors that it is made of (Split, Fuse, Stack, ...)
    lossy        stored names of what was saved with less precision (Quantize)
    bounds       by how much elements of these may be off, by codec: of themselves, or of the largest of their block
    replay       the steps that were replayed after the checkpoint's, if a journal leads further (every_step)
    tier         of several tiers, the location of the one that was read; "" with a single store
    why          why it was that one: what each nearer tier lacked

    A chunk that several parts of a rearranged tensor need is read once, and counts for each.
    """

    step: int
    path: str
    matched: tuple[str, ...]
    initialised: tuple[str, ...]
    skipped: tuple[str, ...]
    cast: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    bytes: int
    seconds: float
    shared_bytes: int = 0
    rearranged: tuple[tuple[str, tuple[str, ...]], ...] = ()
    replay: Replay | None = None
    lossy: tuple[str, ...] = ()
    bounds: tuple[LossyRow, ...] = ()
    tier: str = ""
    why: str = ""
