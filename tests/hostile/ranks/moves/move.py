"""A move of a job: what its ranks do at one point of their loops, each its part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from hostile.ranks.loop import Loop


class Ending(Enum):
    """How a move ends the job, which is then begun anew with another number of ranks.

    NONE     it goes on
    ORDERLY  every rank closes its Checkpointer
    KILLED   processes are killed; those that are left end without a word
    """

    NONE = auto()
    ORDERLY = auto()
    KILLED = auto()


Act = Callable[["Loop", Random], None]
_Act = TypeVar("_Act", bound=Callable[["Loop", Random], None])


@dataclass(frozen=True, slots=True)
class Move:
    """A move of all ranks.

    act     makes it; called on every rank, with chances that are the same on all
    weight  of 1 is what most have in the draw
    basic   loops that are drawn from a few named moves have it all the same
    """

    name: str
    act: Act
    weight: float
    basic: bool
    ending: Ending

    @property
    def says(self) -> str:
        return (self.act.__doc__ or "").strip().splitlines()[0]


class Table(dict[str, Move]):
    """Moves by name; a function's first line of documentation says what it does."""

    def move(
        self, *, weight: float = 1, basic: bool = False, ending: Ending = Ending.NONE
    ) -> Callable[[_Act], _Act]:
        def enter(act: _Act) -> _Act:
            name = act.__name__.replace("_", "-")
            assert name not in self
            assert act.__doc__, f"{name} says not what it does"
            self[name] = Move(name, act, weight, basic, ending)
            return act

        return enter


def some_rank(loop: Loop, chance: Random) -> int:
    """Rank 0, which decides, half of the time."""
    return chance.choice([0, chance.randrange(loop.size)])


BROKEN: dict[str, str] = {}
"""Moves that are known to break the library, and how: not drawn. Empty, or there is something to mend."""
