"""The records that the caller's thread and a journal's threads exchange (journaling.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from flowstone.journal.journal_format import JournalHeader, OptimizerRow, SourceRow
from flowstone.journal.journal_frames import FrameMaker, StepContent
from flowstone.journal.journal_ranks import JointJournal, SteppedParameters
from flowstone.runtime.signal_shield import Latch
from flowstone.save.plan_cache import FenceMode
from flowstone.session.futures import Save
from flowstone.store.appendable import AppendFile
from flowstone.torch.stepped_tensors import Environment
from flowstone.trace import Spans


class Lineage(msgspec.Struct, frozen=True):
    """The step of the state, and the checkpoint or journal that contains it.

    checkpoint  id of the full checkpoint of that step, if one was begun
    journal     id of the journal with that step, if there is one
    """

    step: int
    checkpoint: str | None
    journal: str | None


class JournalMetadata(msgspec.Struct, frozen=True):
    """Facts that all steps of a journal share. `stepped`: None in a job of one rank.

    exactness  exactness of a replay: see journal_format.JournalHeader
    """

    exactness: str
    optimizers: tuple[OptimizerRow, ...]
    proven: tuple[str, ...]
    environment: Environment
    stepped: SteppedParameters | None
    sources: tuple[SourceRow, ...] = ()


class StepAttempt(msgspec.Struct, eq=False):
    """One call of `save` with a journal.

    began           the time of the call
    is_agreed       with several ranks: the next three fields were decided by earlier outcomes, and are equal on all
                    ranks
    is_journaled    the step goes into the journal
    is_full         a full checkpoint is saved
    begins_journal  the step is the first one of its journal

    The progress of the attempt:
    has_begun_journal  this rank's file of that journal is prepared
    has_taken          the recorded optimizer steps were taken: if this attempt fails, they are lost
    is_handed_over     the journal's thread has the step
    owes_full          other ranks wait for this rank's part of the full checkpoint
    """

    step: int
    state: Mapping[str, object]
    fence: FenceMode
    spans: Spans
    began: float
    begins_journal: bool
    is_agreed: bool = False
    is_journaled: bool = True
    is_full: bool = False
    has_begun_journal: bool = False
    has_taken: bool = False
    is_handed_over: bool = False
    owes_full: bool = False

    def mark_journal_begun(self) -> None:
        self.has_begun_journal = True

    def mark_taken(self) -> None:
        self.has_taken = True

    def mark_handed_over(self) -> None:
        self.is_handed_over = True

    def leave_errors_to_saves(self) -> None:
        """The full save begins. From now on, `Saves` reports the errors of this attempt to the other ranks."""
        self.owes_full = False

    def must_save_full(self, content: StepContent | str) -> bool:
        """Whether this attempt must save a full checkpoint instead of a frame in the journal. With one rank: if the
        step cannot be replayed. With several ranks: if they have agreed not to journal this step.
        """
        return not self.is_journaled or (not self.is_agreed and isinstance(content, str))


class StepHooks(msgspec.Struct, frozen=True, eq=False):
    """The callbacks for a step.

    on_submitted  called on the caller's thread, which is not interrupted meanwhile, once the journal's thread has the
                  step
    on_end        called on the journal's thread at the end, with the error, if any
    """

    on_submitted: Callable[[], None]
    on_end: Callable[[BaseException | None], None]


_NO_HOOKS = StepHooks(lambda: None, lambda _: None)


class Step(msgspec.Struct, frozen=True, eq=False):
    """A step for the journal's thread.

    content  the data to replay the step. With several ranks it may instead be the reason why the step cannot be
             replayed (str), or this rank's error
    began    the time of the call of `save`
    save     the Save whose `captured` is to be completed; None: this rank has failed
    is_late, is_free  see journal_ranks.StepReport
    """

    step: int
    content: StepContent | str | Exception
    began: float
    save: Save | None
    hooks: StepHooks
    is_late: bool = False
    is_free: bool = True


class StepOutcome(msgspec.Struct, frozen=True):
    """The outcome of steps that several ranks write to the journal. It is the same on all ranks.

    failed  whether one of these steps was not committed
    is_due  whether the next step is also saved in full
    """

    failed: bool
    is_due: bool


class JournalWriter(msgspec.Struct, frozen=True, eq=False):
    """The file of a journal, and the maker of its frames."""

    opening: JournalHeader
    maker: FrameMaker
    appending: AppendFile


class JournalFile(msgspec.Struct):
    """A journal of this process.

    proposal  this rank's proposed header; or why it cannot take part
    stepped   with several ranks: the parameters that this rank updates
    joint     with several ranks: their agreement
    writer    None until the first step is written
    steps     the number of steps
    failed    with several ranks: the step that was not committed; later steps fail, too
    """

    proposal: JournalHeader | str
    stepped: SteppedParameters | None = None
    joint: JointJournal | None = None
    writer: JournalWriter | None = None
    steps: int = 0
    failed: int | None = None

    def join(self, joint: JointJournal) -> None:
        """Record that the ranks have agreed on this journal."""
        self.joint = joint

    def start(self, writer: JournalWriter) -> None:
        """Record that this journal's file exists."""
        self.writer = writer

    def count_step(self) -> None:
        self.steps += 1

    def fail(self, step: int) -> None:
        """Record that this step is missing, so later steps cannot be appended."""
        self.failed = step if self.failed is None else min(self.failed, step)


class PendingFrame(msgspec.Struct, eq=False):
    """A step that is being journaled. `over`, `fingerprinted` and `is_proven` are latches: events that stay set.

    over           set once the step is durable, or has failed
    fingerprinted  set once the fingerprint of host memory is computed; until then the memory must not change
    is_proven      set once `fingerprint` is known, or cannot be computed
    held_bytes     bytes of gradients that the step keeps in memory
    length         length of its frame, in bytes; 0 until it is written
    failure        the first error so far
    is_behind      whether this step has failed because an earlier step of this journal has failed
    is_asked       with several ranks: the ranks still have to agree on this step
    claim          see journal_ranks.StepReport
    ended          with several ranks: the outcome of this step
    may_be_due     no full save has begun since this step, so the step can still request one
    """

    file: JournalFile
    step: Step
    over: Latch
    fingerprinted: Latch
    is_proven: Latch
    held_bytes: int
    fingerprint: str = ""
    length: int = 0
    failure: BaseException | None = None
    is_behind: bool = False
    is_asked: bool = True
    claim: int = 0
    ended: StepOutcome | None = None
    may_be_due: bool = True

    def note_fingerprint(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def note_appended(self, length: int, claim: int = 0) -> None:
        """Record that this step's frame is in the file, but not yet durable. `length`: the frame's length in bytes."""
        self.length, self.claim = length, claim

    def fail(self, failure: BaseException) -> None:
        self.failure = failure

    def mark_behind(self) -> None:
        self.is_behind = True

    def mark_refused(self) -> None:
        """Record that the ranks could not agree on a journal, so they need not agree on this step."""
        self.is_asked = False

    def drop_full_request(self) -> None:
        self.may_be_due = False

    def end(self, outcome: StepOutcome) -> None:
        """Record the outcome of this step, which is the same on all ranks."""
        self.ended = outcome

    def release(self) -> None:
        """Release the gradients of this step, once it is durable or has failed."""
        self.step, self.failure = Step(self.step.step, "", self.step.began, None, _NO_HOOKS), None


def own_part(content: StepContent, joint: JointJournal) -> StepContent:
    """The part of a step that this rank logs: gradients that several ranks have are divided among these ranks."""
    records = [
        msgspec.structs.replace(
            record, gradients=tuple(row for row in record.gradients if joint.logs(record.optimizer, row.parameter)),
            compressed=tuple(row for row in record.compressed if joint.logs(record.optimizer, row.parameters[0][0])),
        )
        for record in content.records
    ]
    return msgspec.structs.replace(content, records=records)
