"""A save in flight, as its caller sees it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flowstone.reader import Checkpoint

_Result = TypeVar("_Result")


class ReportedFuture(Future[_Result], Generic[_Result]):
    """A Future that knows whether its failure was handed to anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.reported = False

    def result(self, timeout: float | None = None) -> _Result:
        try:
            return super().result(timeout)
        finally:
            self.reported = self.done()  # not after a timeout: the failure is still to come

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.reported = True
        return error

    def failure(self) -> BaseException | None:
        """The failure of a finished future that nobody has seen yet; seeing it here does not count."""
        if not self.done() or self.reported:
            return None
        return super().exception()

    def failed(self) -> bool:
        """Whether the future is finished without a result; asking does not count as seeing."""
        return self.done() and super().exception() is not None


@dataclass(frozen=True, slots=True)
class Save:
    """One save.

    captured   done once the state may change
    committed  done once the checkpoint is durable; its result is the Checkpoint, and it raises
               whatever ended the save
    """

    step: int
    captured: Future[None] = field(default_factory=Future)
    committed: ReportedFuture[Checkpoint] = field(default_factory=ReportedFuture)
