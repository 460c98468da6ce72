"""What a move is, and what it declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from hostile.trainer import Trainer


class Effect(Enum):
    """What a move does to saves whose capture is under way.

    QUIET    nothing: no byte of theirs changes, or only after a wait, so they have to be committed
    ESCAPES  it changes bytes of theirs, or takes the memory away: they hold what was saved, or fail by name
    """

    QUIET = auto()
    ESCAPES = auto()


class Detection(Enum):
    """By what means the library has to find it, if it reaches a capture.

    NOTHING  it has nothing to find
    SAMPLES  every element changes, or nearly every one: a few lines of each chunk show it
    COUNTER  an operation of torch's in place: it may change few bytes, and moves a version counter
    EXACT    few bytes, and no counter: of memory of which the system tells each written page
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

    weight  of 1 is what most have in the draw
    basic   loops that are drawn from a few named moves have it all the same
    needs   without which there is nothing to do it to: an extra of the state, a kind of optimizer, or slots of any
    act     makes the move; returns False when it found nothing to do it to
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
    """Moves by name; its methods register functions, whose first line of documentation says what they do."""

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
"""Moves that are known to break the library, and how: not drawn. Empty, or there is something to mend."""
