"""A save in flight, as its caller sees it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from flowstone.checkpoint import Checkpoint
from flowstone.runtime.uninterrupted import Latch

_Result = TypeVar("_Result")


class ExpeditingFuture(Future[_Result], Generic[_Result]):
    """A Future that reports when a thread waits for it. `cancel` does not stop a save.

    expedite  called by a thread that has to wait
    check     called before that; raises if the wait could last for ever
    latch     opens when the future is done. Waiters use it instead of the Future's own locks, which an interrupt could
              leave locked; the thread that finishes saves would then block for ever
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.expedite: Callable[[], None] = _nothing
        self.check: Callable[[], None] = _nothing
        self.latch = Latch()
        self._outcome: tuple[_Result | None, BaseException | None] = (None, None)

    def set_result(self, result: _Result) -> None:
        self._end(result, None)
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        self._end(None, exception)
        super().set_exception(exception)

    def _end(self, result: _Result | None, exception: BaseException | None) -> None:
        self._outcome = result, exception
        self.latch.open()
        self.expedite = self.check = _nothing  # a Save that the caller keeps must not keep other objects alive

    def done(self) -> bool:
        return self.latch.is_open

    def result(self, timeout: float | None = None) -> _Result:
        error = ExpeditingFuture.exception(self, timeout)
        if error is not None:
            raise error
        return cast("_Result", self._outcome[0])

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._before_wait(timeout)
        if not self.latch.wait(timeout):
            raise TimeoutError
        return self._outcome[1]

    def _before_wait(self, timeout: float | None) -> None:
        if not self.done():
            if timeout is None or timeout > 0:
                self.check()
            self.expedite()

    def await_end(self) -> None:
        """Wait until it is done, on a thread of ours: another thread is certain to finish it."""
        if not self.done():
            self.expedite()
            self.latch.wait()

    def tell(self: ExpeditingFuture[None]) -> None:
        """Mark it as done; later calls do nothing. Any thread."""
        with suppress(InvalidStateError):
            self.set_result(None)


def _nothing() -> None: ...


class ReportedFuture(ExpeditingFuture[_Result], Generic[_Result]):
    """A Future that records whether its failure was returned or raised to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.reported = False

    def result(self, timeout: float | None = None) -> _Result:
        self._before_wait(timeout)
        try:
            return super().result(timeout)
        finally:
            self.reported = self.done()  # not after a timeout: the failure is still to come

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.reported = True
        return error

    def failure(self) -> BaseException | None:
        """The failure of a finished future, if it was not reported yet; reading it here does not report it."""
        if not self.done() or self.reported:
            return None
        return super().exception()

    def failed(self) -> bool:
        """Whether the future ended without a result; asking does not report the failure."""
        return self.done() and super().exception() is not None


@dataclass(frozen=True, slots=True)
class Save:
    """One save.

    Waiting for one of its futures by `result` or `exception` ends the overlap budget of the capture, of this save and
    of earlier ones; for `committed` or `durable` also the pace of copies for other nodes. In a callback of either
    future, and in `on_event`, a wait raises BusyError: saves are finished one after the other, on the very thread that
    would wait.

    captured   done once the state may change
    committed  done once the checkpoint is durable; its result is the Checkpoint, its exception the save's failure. Of
               several tiers: durable in the first one, as far as that outlives anything
    later      set if the first of several tiers is volatile: see `durable`
    """

    step: int
    captured: ExpeditingFuture[None] = field(default_factory=ExpeditingFuture)
    committed: ReportedFuture[Checkpoint] = field(default_factory=ReportedFuture)
    later: ExpeditingFuture[Checkpoint] | None = None

    @property
    def durable(self) -> ExpeditingFuture[Checkpoint]:
        """Done once the nearest store that outlives this machine has the checkpoint: `committed`, unless the first of
        several tiers is volatile.

        Its exception, a SaveFailedError, says why this step does not come there: `every`, `lag`, a rewind, the end.
        """
        return self.committed if self.later is None else self.later


def end_with(save: Save, root: Save) -> None:
    """Complete a durable step once `root` has ended, which it leads from."""
    failure = ExpeditingFuture.exception(root.committed)
    if failure is not None:
        save.committed.set_exception(failure)
    else:
        save.committed.set_result(ExpeditingFuture.result(root.committed).with_journal(save.step))
