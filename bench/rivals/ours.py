"""Flowstone, with its defaults. Digests cannot be switched off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.state import State
from flowstone import Checkpointer


class Flowstone:
    """One Checkpointer for all saves of a process, as a training job has it."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._checkpointer: Checkpointer | None = None

    def prepare(self) -> None:
        pass

    def save(self, state: State, number: int) -> Callable[[], object]:
        save = self._opened().save(number, state)
        save.captured.result()
        return save.committed.result

    def place(self, number: int) -> Path:
        return self._store / f"step-{number:08d}"

    def load(self, state: State, number: int, _how: str, /) -> None:
        report = self._opened().load(state)
        assert report.step == number

    def close(self) -> None:
        self._opened().close()

    def _opened(self) -> Checkpointer:
        """Opened inside the timer, by the first save or load."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(self._store)
        return self._checkpointer


def open_rival(_name: str, directory: Path) -> Flowstone:
    return Flowstone(directory / "store")
