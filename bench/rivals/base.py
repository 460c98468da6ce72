"""What every rival is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bench.state import State


class Rival(Protocol):
    """One system, used as its documentation says. Made in a fresh process; everything it imports, it imports then."""

    def prepare(self, state: State, what: str, /) -> None:
        """What a job does once, before its first "save" or "load": process groups and the like. Not timed.

        Memory that it takes counts as the rival's.
        """

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        """Save; return once the state may change. What is returned waits until the save is durable."""

    def place(self, number: int, /) -> Path:
        """The directory that holds the files of save `number`, and nothing else."""

    def load(self, state: State, number: int, how: str, /) -> None:
        """Bring save `number` into the state's own tensors, in one of the ways that its Entry lists."""

    def note(self, number: int, /) -> str:
        """How the bytes of save `number` moved, if the rival can tell; else nothing."""

    def close(self) -> None:
        """Not timed."""


class SavesInDirectories:
    """A rival that needs no preparation and writes each save into a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self, state: State, what: str, /) -> None:
        pass

    def place(self, number: int, /) -> Path:
        return self._directory / f"save-{number}"

    def note(self, _number: int, /) -> str:
        return ""

    def close(self) -> None:
        pass


def already_durable() -> None:
    """What a save that did everything before it returned hands back."""
