"""The messages of one act's processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowstone_demo.messages import Began, Finished, Message, SaveCaptured, SaveCommitted, Stepped, TorchSaved


@dataclass(frozen=True, slots=True)
class SaveTime:
    """One committed save: how long training was blocked, and how long until it was durable."""

    step: int
    bytes: int
    blocked_s: float
    durable_s: float


@dataclass(slots=True)
class RunLog:
    """Every message of an act, in order of arrival, over all its processes."""

    began: list[Began] = field(default_factory=list)
    steps: list[Stepped] = field(default_factory=list)
    saves: list[SaveTime] = field(default_factory=list)
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
            case TorchSaved():
                self.torch_saves.append(message)
            case Finished():
                self.finished = message

    @property
    def promised(self) -> int:
        """The highest step reported committed; 0 before the first."""
        return max((save.step for save in self.saves), default=0)

    def shortest_save_s(self, unknown: float) -> float:
        """The shortest time until durable so far; `unknown` before the first save."""
        return min((save.durable_s for save in self.saves), default=unknown)

    def line(self, steps: int) -> str:
        """The progress of the training, for a person."""
        if not self.steps:
            return "starting the training process"
        last = self.steps[-1]
        shown = f"step {last.step:3d} of {steps}   loss {last.loss:.3f}"
        return f"{shown}   saves {len(self.saves)}" if self.saves else shown
