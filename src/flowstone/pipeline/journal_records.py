"""What the caller's thread and those of a journal exchange (journaling.py)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flowstone.format.journal import Opening, OptimizerRow, SourceRow
from flowstone.pipeline.futures import Save
from flowstone.pipeline.journal_ranks import Joint, Stepped
from flowstone.runtime.uninterrupted import Latch
from flowstone.stage.journal_frames import FrameMaker, StepContent
from flowstone.state.stepped import Environment
from flowstone.store.appends import Appending


class Lineage(msgspec.Struct, frozen=True):
    """Where the state is: at a step that the store leads to.

    checkpoint  id of the checkpoint of that step, if one was begun
    journal     id of the journal that has that step, if one does
    """

    step: int
    checkpoint: str | None
    journal: str | None


class Kept(msgspec.Struct, frozen=True):
    """What stays the same for all steps of a journal. `stepped`: None in a job of one rank.

    exactness  of a replay, as far as this process can tell
    """

    exactness: str
    optimizers: tuple[OptimizerRow, ...]
    proven: tuple[str, ...]
    environment: Environment
    stepped: Stepped | None
    sources: tuple[SourceRow, ...] = ()


class Step(msgspec.Struct, frozen=True, eq=False):
    """A step for the journal's thread.

    content  what replays it. In a job of several ranks also why nothing does, or why this rank does not make it
    began    when `save` was called
    save     whose `captured` is completed; None: this rank does not make the step
    end      called on the thread, with what went wrong
    is_late  and `is_free`: see journal_ranks.Said
    """

    step: int
    content: StepContent | str | Exception
    began: float
    save: Save | None
    end: Callable[[BaseException | None], None]
    is_late: bool = False
    is_free: bool = True


class Ended(msgspec.Struct, frozen=True):
    """How steps of several ranks have ended, on all of them. `is_due`: the next one is to be saved whole as well."""

    failed: bool
    is_due: bool


class File(msgspec.Struct):
    """A journal of this process.

    opening    as this rank would write it alone; None: it cannot, `why`
    joint      what several ranks have agreed on
    appending  None until its first step is written, as is `maker`
    steps      how many it has
    failed     of several ranks: the step that was not committed, from which on none is
    """

    opening: Opening | None
    stepped: Stepped | None = None
    why: str = ""
    joint: Joint | None = None
    maker: FrameMaker | None = None
    appending: Appending | None = None
    steps: int = 0
    failed: int | None = None


class UnderWay(msgspec.Struct, eq=False):
    """A step on its way to the file.

    over           opened once it is durable, or has failed
    fingerprinted  opened once its fingerprint has been read from host memory, which must not change before that
    is_proven      opened once `fingerprint` is there, or cannot be
    held_bytes     of gradients, which it keeps in memory
    length         of its frame
    failure        what has gone wrong so far
    is_behind      an earlier step of this journal has failed, and this one with it
    is_asked       of several ranks: they agree on it
    claim          see journal_ranks.Said
    ended          of several ranks: how, once it is over
    may_be_due     what it says of a whole save still counts: none has begun since
    """

    file: File
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
    ended: Ended | None = None
    may_be_due: bool = True

    def let_go(self) -> None:
        """It is over: what it has kept in memory goes."""
        self.step, self.failure = Step(self.step.step, "", self.step.began, None, _nothing), None


def own_part(content: StepContent, joint: Joint) -> StepContent:
    """What this rank logs of a step: of the gradients that other ranks have as well, its share."""
    acts = [
        msgspec.structs.replace(
            act, gradients=tuple(one for one in act.gradients if joint.logs(act.optimizer, one.parameter)),
            compressed=tuple(one for one in act.compressed if joint.logs(act.optimizer, one.parameters[0][0])),
        )
        for act in content.acts
    ]
    return msgspec.structs.replace(content, acts=acts)


def _nothing(_: object) -> None: ...
