"""Work beside training: saves, one after the other, with the removals that come between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from flowstone.errors import FlowstoneError, SaveFailedError
from flowstone.log import log
from flowstone.runtime.ending import without_frames

_IN_FLIGHT_MAX = 2  # the stager has two buffers


class Background:
    """One thread for all that is handed over, in that order. A failure is kept until a call raises it.

    cause  says in words what has failed
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

    def make_room(self, path: Path) -> None:
        """Wait until a save at `path` may begin: few others are under way, and none at the same path."""
        while len(self._pending) >= _IN_FLIGHT_MAX or any(other == path for other, _ in self._pending):
            self._await_oldest()

    def hand_over(self, path: Path | None, act: Callable[[], None]) -> None:
        """Do it on the thread. `path`: of the checkpoint that it makes; None: it removes one."""
        self._pending.append((path, self._thread.submit(self._guarded, path, act)))

    def _guarded(self, path: Path | None, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            without_frames(error)  # which hold the state
            if self._failure is None:
                self._failure, self._failed_at = error, path
            else:
                log.error("saving %s failed too: %s", path, error)

    def wait(self) -> None:
        """Wait until everything has ended, and raise a failure that was not raised yet."""
        self.await_all()
        self.raise_failure()

    def await_all(self) -> None:
        while self._pending:
            self._await_oldest()

    def _await_oldest(self) -> None:
        self._pending[0][1].result()
        self._pending.popleft()

    def raise_failure(self) -> None:
        """Raise the failure of something earlier, once. Raises SaveFailedError."""
        while self._pending and self._pending[0][1].done():
            self._pending.popleft()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise SaveFailedError(
                f"saving {self._failed_at} failed in the background: there is no such checkpoint"
                if self._failed_at is not None else "a checkpoint could not be removed",
                cause=self._cause(failure), next="correct the cause, and resume from the checkpoint before",
            ) from failure

    def close(self) -> None:
        """Wait for everything, and end the thread. Raises what `wait` raises."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=True)


class Closable(Protocol):
    def close(self) -> None: ...


def close_saves(saves: Closable, *, training_has_failed: bool) -> None:
    """Close them. Their failure is only logged where it would mask the first error: that of the training."""
    try:
        saves.close()
    except FlowstoneError as failure:
        if not training_has_failed:
            raise
        log.error("saving failed too, after another error: %s", failure)
