"""The messages of the processes of one act."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowstone_demo.messages import (
    Began,
    Finished,
    Message,
    SaveCaptured,
    SaveCommitted,
    Saved,
    StepDurable,
    Stepped,
    TorchSaved,
)


@dataclass(frozen=True, slots=True)
class SaveTime:
    """The times of one committed save: how long it blocked training, and how long until it was durable."""

    step: int
    bytes: int
    blocked_s: float
    durable_s: float


@dataclass(slots=True)
class RunLog:
    """All messages of an act's processes, in the order in which they arrived."""

    began: list[Began] = field(default_factory=list)
    steps: list[Stepped] = field(default_factory=list)
    saves: list[SaveTime] = field(default_factory=list)
    returned: list[Saved] = field(default_factory=list)
    journaled: list[StepDurable] = field(default_factory=list)
    torch_saves: list[TorchSaved] = field(default_factory=list)
    finished: Finished | None = None
    _blocked_s: dict[int, float] = field(default_factory=dict)

    def enter(self, message: Message) -> None:
        match message:
            case Began():
                self.began.append(message)
            case Stepped():
                self.steps.append(message)
            case SaveCaptured(step, blocked_s):
                self._blocked_s[step] = blocked_s
            case SaveCommitted(step, bytes, seconds):
                self.saves.append(SaveTime(step, bytes, self._blocked_s[step], seconds))
            case Saved():
                self.returned.append(message)
            case StepDurable():
                self.journaled.append(message)
            case TorchSaved():
                self.torch_saves.append(message)
            case Finished():
                self.finished = message

    @property
    def promised(self) -> int:
        """The highest step that was reported durable, in a checkpoint or the journal; 0: none."""
        return max(0, *(save.step for save in self.saves), *(step.step for step in self.journaled), 0)

    @property
    def last_returned(self) -> int:
        """The highest step whose `save` has returned; 0: none."""
        return max((save.step for save in self.returned), default=0)

    def shortest_save_s(self, unknown: float) -> float:
        """The shortest time, in seconds, until a save was durable; `unknown` before the first save."""
        return min((save.durable_s for save in self.saves), default=unknown)

    def line(self, steps: int) -> str:
        """The progress of the training, as a line of text."""
        if not self.steps:
            return "starting the training process"
        last = self.steps[-1]
        shown = f"step {last.step:3d} of {steps}   loss {last.loss:.3f}"
        if self.journaled:
            return f"{shown}   durable in the journal {len(self.journaled)}   checkpoints {len(self.saves)}"
        return f"{shown}   saves {len(self.saves)}" if self.saves else shown
