"""A move, and its declarations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from hostile.trainer import Trainer


class Effect(Enum):
    """The effect of a move on saves whose capture is running.

    QUIET    none: it changes no byte of them, or only after a wait, so they have to be committed
    ESCAPES  it changes bytes of them, or frees the memory: they contain the saved values, or fail by name
    """

    QUIET = auto()
    ESCAPES = auto()


class Detection(Enum):
    """The method by which the library has to detect a move that affects a capture.

    NOTHING  there is nothing to detect
    SAMPLES  nearly every element changes: a few lines of each chunk show it
    COUNTER  an in-place operation of torch: it may change few bytes, and moves a version counter
    EXACT    few bytes, and no counter: only memory whose written pages the system reports
    MEMORY   the memory is gone or cannot be read
    """

    NOTHING = auto()
    SAMPLES = auto()
    COUNTER = auto()
    EXACT = auto()
    MEMORY = auto()


Act = Callable[["Trainer", Random], "bool | None"]
_Act = TypeVar("_Act", bound=Callable[["Trainer", Random], "bool | None"])


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a loop.

    weight  relative frequency; most moves have 1
    basic   loops that are restricted to a few named moves still have it
    needs   the part of the state that it changes: an extra, a kind of optimizer, or slots of any optimizer
    act     makes the move; returns False if there was nothing to change
    """

    name: str
    act: Act
    effect: Effect
    detection: Detection
    weight: float
    basic: bool
    needs: str

    @property
    def says(self) -> str:
        return (self.act.__doc__ or "").strip().splitlines()[0]


class Table(dict[str, Move]):
    """Moves by name; its methods register functions, whose first docstring line describes the move."""

    def quiet(self, *, weight: float = 1, basic: bool = False, needs: str = "") -> Callable[[_Act], _Act]:
        return self._entered(Effect.QUIET, Detection.NOTHING, weight, basic, needs)

    def escapes(self, detection: Detection, *, weight: float = 1, needs: str = "") -> Callable[[_Act], _Act]:
        return self._entered(Effect.ESCAPES, detection, weight, False, needs)

    def _entered(
        self, effect: Effect, detection: Detection, weight: float, basic: bool, needs: str
    ) -> Callable[[_Act], _Act]:
        def enter(act: _Act) -> _Act:
            name = act.__name__.replace("_", "-")
            assert name not in self
            assert act.__doc__, f"{name} says not what it does"
            self[name] = Move(name, act, effect, detection, weight, basic, needs)
            return act

        return enter


BROKEN: dict[str, str] = {}
"""Moves that are known to break the library, and how. They are not drawn. Empty, unless something has to be fixed."""
