"""The outcome of a load: a report for its caller, and facts for the next save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.errors import DamagedError
from flowstone.format.manifest import LossyRow


class VerifiedRead(msgspec.Struct, frozen=True, eq=False):
    """The chunks of a checkpoint that a load has read and verified, so that later saves may refer to them.

    step, id  step and id of the checkpoint
    chunks    for each chunk of the checkpoint's index one bit, which says whether the chunk was read
    stamps    size and time stamps, by name, of the files that a later save of this rank may refer to; taken before the
              first byte was read
    """

    step: int
    id: str
    chunks: NDArray[np.uint8]
    stamps: Mapping[str, str | None]


class LoadOutcome(msgspec.Struct, eq=False):
    """The outcome of the loads of one Checkpointer, mostly of the last load.

    unfinished        why the state must not be saved: a load changed a part of it and failed. None: it may be saved
    superseded_above  the step that a load with `fallback` loaded in place of newer, damaged steps. The next save sets
                      these newer steps aside. None: no such load
    loads             how many loads have begun to read
    verified          the chunks that the last load has read, if it succeeded
    """

    unfinished: str | None = None
    superseded_above: int | None = None
    loads: int = 0
    verified: VerifiedRead | None = None

    def begin(self, step: int) -> str | None:
        """Record that a load of `step` begins to read. Returns the previous value of `unfinished`, for `undo`."""
        before, self.unfinished = self.unfinished, f"the load of step {step} did not finish"
        self.loads += 1
        self.verified = None
        return before

    def begin_replay(self, base: int) -> None:
        """Record that from now on the steps of a journal are replayed, after the checkpoint of step `base` was loaded.
        """
        self.unfinished = f"the replay of the steps after {base} did not finish"

    def end_replay(self) -> None:
        self.unfinished = None

    def undo(self, unfinished: str | None) -> None:
        """Set `unfinished` back to its earlier value: the load has failed, but certainly no rank has changed a byte."""
        self.unfinished = unfinished

    def succeed(self, verified: VerifiedRead | None) -> None:
        """Record that the load has succeeded, so that the state is consistent. `verified`: see the attribute."""
        self.unfinished, self.verified = None, verified

    def drop_verified(self) -> None:
        """Record that the next save must not refer to the files that the load has read."""
        self.verified = None

    def fall_back(self, step: int) -> None:
        """Record that the load has skipped the steps above `step`, which are damaged."""
        self.superseded_above = step

    def settle_fallback(self) -> None:
        """Record that the steps above `superseded_above` have been set aside."""
        self.superseded_above = None

    def check_whole(self) -> None:
        """Raise DamagedError if the state may be a mixture of two steps."""
        if self.unfinished is not None:
            raise DamagedError(
                f"cannot save the state: {self.unfinished}, and part of the state has changed",
                next="load again: the state can be saved once a load has succeeded",
            )


@dataclass(frozen=True, slots=True)
class Replay:
    """The steps that a load has replayed.

    base       the step of the checkpoint that was read
    steps      how many were replayed
    newest     the newest step in the journal; greater than the report's step if not all steps could be replayed
    exactness  "exact": fingerprints prove that the state is bit-identical to the saved one; every tensor of an
               optimizer, and every frozen tensor, is compared once in eight steps.
               "tolerance": the state may differ from the saved one, because torch's version, the processor or the
               kind of device has changed, a fingerprint differs, or a device could not compute a fingerprint
    differs_from  the first step whose fingerprint differs from the saved one; None if all are equal
    reason     why not all steps were replayed; "" if all were
    approximate  sections that are only restored approximately: residuals of compressed gradients. `exactness` does not
                 take them into account
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
    """The report of a load.

    matched      names of the tensors that were read
    initialised  names of tensors in the state that the checkpoint lacks, and that were left as they were (rule Init)
    skipped      names of stored tensors that the state lacks (rule Skip)
    cast         names of tensors that were converted from another dtype (rule Cast)
    renamed      for each tensor with another name in the state: stored name, and name in the state (rule Rename)
    notes        remarks on anything unusual; on rank 0 also a remark if later steps, durable in a journal, are lost
    bytes        length of the chunks that this rank has read
    shared_bytes length of the chunks that this rank got from shared reads on its node, including its own reads
    rearranged   for each tensor that a layout rule made (Split, Fuse, Stack, ...): its name in the state, and the
                 names of the stored tensors from which it was made
    lossy        stored names of tensors that were saved with less precision (Quantize)
    bounds       by codec: how far elements of lossy tensors may differ from the saved ones, at most, relative to the
                 element, or to the largest element of its block
    replay       the steps of a journal that were replayed after the checkpoint (every_step); None: no replay
    tier         location of the tier that was read; "" with a single store
    why          why that tier was read: what each nearer tier lacked

    A chunk that several parts of a rearranged tensor need is read once, but counted for each part.
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
