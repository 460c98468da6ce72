"""Work in the background of training: saves and removals, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from flowstone.errors import FlowstoneError, SaveFailedError
from flowstone.log import log
from flowstone.runtime.exit_hook import without_frames

_IN_FLIGHT_MAX = 2  # how many saves may be in flight, as the stager has two buffers


class BackgroundThread:
    """Runs submitted work on one thread, in order. If work fails, the next call of a method raises the failure.

    cause  returns the error as text
    """

    def __init__(self, cause: Callable[[BaseException], str] = str) -> None:
        self._cause = cause
        self._thread = ThreadPoolExecutor(1, "flowstone-lightning")
        self._pending: deque[tuple[Path | None, Future[None]]] = deque()
        self._failure: BaseException | None = None
        self._failed_at: Path | None = None

    @property
    def is_idle(self) -> bool:
        return not self._pending

    def await_slot(self, path: Path) -> None:
        """Wait until a save to `path` may begin: fewer than two saves are in flight, and none of them is to the same
        path.
        """
        while len(self._pending) >= _IN_FLIGHT_MAX or any(other == path for other, _ in self._pending):
            self._await_oldest()

    def submit(self, path: Path | None, act: Callable[[], None]) -> None:
        """Run `act` on the thread. `path`: the checkpoint that `act` saves; None if it removes one."""
        self._pending.append((path, self._thread.submit(self._guarded, path, act)))

    def _guarded(self, path: Path | None, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            without_frames(error)  # the frames would keep the state alive
            if self._failure is None:
                self._failure, self._failed_at = error, path
            else:
                log.error("after an earlier error, saving %s failed too: %s", path, error)

    def wait(self) -> None:
        """Wait for all work, and raise a failure that was not raised yet."""
        self.await_all()
        self.raise_failure()

    def await_all(self) -> None:
        while self._pending:
            self._await_oldest()

    def _await_oldest(self) -> None:
        self._pending[0][1].result()
        self._pending.popleft()

    def raise_failure(self) -> None:
        """Raise the failure of earlier work, once, as SaveFailedError."""
        while self._pending and self._pending[0][1].done():
            self._pending.popleft()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise SaveFailedError(
                f"saving {self._failed_at} failed in the background; the checkpoint was not created"
                if self._failed_at is not None else "a checkpoint could not be removed",
                cause=self._cause(failure), next="correct the cause, and resume from the newest checkpoint",
            ) from failure

    def close(self) -> None:
        """Wait for all work, and end the thread. Raises the errors of `wait`."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=True)


class Closable(Protocol):
    def close(self) -> None: ...


def close_saves(saves: Closable, *, training_has_failed: bool) -> None:
    """Close the saves. If the training has failed, a failure of a save is only logged, as raising it would hide the
    training's error.
    """
    try:
        saves.close()
    except FlowstoneError as failure:
        if not training_has_failed:
            raise
        log.error("saving failed too, after another error: %s", failure)
