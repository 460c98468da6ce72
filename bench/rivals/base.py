"""The interface of a rival."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bench.state import State


class Rival(Protocol):
    """One system, used as its documentation says. Created in a new process, in which it imports its packages."""

    def prepare(self, state: State, verb: str, /) -> None:
        """Done once by a job, before its first "save" or "load": process groups and the like. Not timed.

        Memory that it allocates counts as the rival's.
        """

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        """Save; return once the state may change. The returned function waits until the save is durable."""

    def place(self, number: int, /) -> Path:
        """The directory that contains the files of save `number`, and nothing else."""

    def load(self, state: State, number: int, how: str, /) -> None:
        """Load save `number` into the state's own tensors, in one of the ways that its Entry lists."""

    def note(self, number: int, /) -> str:
        """How the bytes of save `number` moved, if the rival reports it; else ""."""

    def close(self) -> None:
        """Not timed."""


class SavesInDirectories:
    """A rival that needs no preparation and writes each save into a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self, state: State, verb: str, /) -> None:
        pass

    def place(self, number: int, /) -> Path:
        return self._directory / f"save-{number}"

    def note(self, _number: int, /) -> str:
        return ""

    def close(self) -> None:
        pass


def already_durable() -> None:
    """The result of a save that did everything before it returned."""
