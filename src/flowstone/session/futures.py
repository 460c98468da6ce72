"""What a call of `save` returns: the object Save with its futures."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

import msgspec

from flowstone.reading.checkpoint import Checkpoint
from flowstone.runtime.signal_shield import Latch

_Result = TypeVar("_Result")


def _nothing() -> None: ...


class FutureHooks(msgspec.Struct, frozen=True):
    """Functions that are called by a thread that waits for a future.

    on_check  called before the wait; raises an error if the wait could last for ever
    on_wait   called when the future is not done yet, so that the thread has to wait
    """

    on_check: Callable[[], None] = _nothing
    on_wait: Callable[[], None] = _nothing


class ExpeditingFuture(Future[_Result], Generic[_Result]):
    """A Future that reports when a thread waits for it. `cancel` does not stop a save.

    latch  opens when the future is done. Callers wait for the latch, and do not use the Future's own locks: an
           interrupt could leave a lock held for ever, and the thread that finishes saves would wait for it
    """

    def __init__(self, hooks: FutureHooks | None = None) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._hooks = hooks
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
        self._hooks = None  # so that a Save that the caller keeps does not keep other objects alive

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
        hooks = self._hooks
        if hooks is not None and not self.done():
            if timeout is None or timeout > 0:
                hooks.on_check()
            hooks.on_wait()

    def await_end(self) -> None:
        """Wait until the future is done. Call this only on Flowstone's own threads, and only if another thread is
        certain to complete the future.
        """
        hooks = self._hooks
        if not self.done():
            if hooks is not None:
                hooks.on_wait()
            self.latch.wait()

    def complete(self: ExpeditingFuture[None]) -> None:
        """Mark the future as done; later calls do nothing. Can be called on any thread."""
        with suppress(InvalidStateError):
            self.set_result(None)


class ReportedFuture(ExpeditingFuture[_Result], Generic[_Result]):
    """A Future that records whether its failure was returned or raised to the caller."""

    def __init__(self, hooks: FutureHooks | None = None) -> None:
        super().__init__(hooks)
        self.reported = False

    def result(self, timeout: float | None = None) -> _Result:
        self._before_wait(timeout)
        try:
            return super().result(timeout)
        finally:
            self.reported = self.done()  # False after a timeout, as the save has not failed yet

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.reported = True
        return error

    def mark_reported(self) -> None:
        """Record that the failure was reported to the caller in another way."""
        self.reported = True

    def failure(self) -> BaseException | None:
        """The failure of a finished future, if it was not reported yet; else None. Reading this attribute does not
        count as a report.
        """
        if not self.done() or self.reported:
            return None
        return super().exception()

    def failed(self) -> bool:
        """Whether the future ended without a result. Reading this attribute does not count as a report of the failure.
        """
        return self.done() and super().exception() is not None


@dataclass(frozen=True, slots=True)
class Save:
    """One save that was started by `Checkpointer.save`.

    `result` or `exception` of a future wait until it is done. During such a wait, this save and earlier ones are
    captured at full speed; a wait for `committed` or `durable` also speeds up copies to other nodes. In a callback of a
    future, and in `on_event`, a wait raises BusyError: callbacks run on the thread that finishes saves, so this thread
    would wait for itself.

    captured   done once the state may change
    committed  done once the checkpoint is durable; its result is the Checkpoint, its exception the save's failure. With
               several tiers: durable in the first one, which may be memory
    later      the future that `durable` returns if the first of several tiers is volatile; otherwise None
    """

    step: int
    captured: ExpeditingFuture[None] = field(default_factory=ExpeditingFuture)
    committed: ReportedFuture[Checkpoint] = field(default_factory=ReportedFuture)
    later: ExpeditingFuture[Checkpoint] | None = None

    @property
    def durable(self) -> ExpeditingFuture[Checkpoint]:
        """A future that is done once the nearest store that survives the loss of this machine has the checkpoint. This
        is `committed`, unless the first of several tiers is volatile.

        The future's exception, a SaveFailedError, says why that store does not get this step: `every` or `lag` of the
        tier, a rewind, or the end of the job.
        """
        return self.committed if self.later is None else self.later


def end_with(save: Save, root: Save) -> None:
    """Complete the futures of `save`, a step in a journal. Called once `root`, the full save that the journal
    continues, has ended.
    """
    failure = ExpeditingFuture.exception(root.committed)
    if failure is not None:
        save.committed.set_exception(failure)
    else:
        save.committed.set_result(ExpeditingFuture.result(root.committed).with_journal(save.step))
