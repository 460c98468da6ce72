"""A move of a job: the actions of its ranks, each its part, at one point of their loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from hostile.ranks.loop import Loop


class Ending(Enum):
    """How a move ends the job, which is then restarted with another number of ranks.

    NONE     the job continues
    ORDERLY  every rank closes its Checkpointer
    KILLED   processes are killed; the remaining ones end without closing anything
    """

    NONE = auto()
    ORDERLY = auto()
    KILLED = auto()


Act = Callable[["Loop", Random], None]
_Act = TypeVar("_Act", bound=Callable[["Loop", Random], None])


@dataclass(frozen=True, slots=True)
class Move:
    """A move of all ranks.

    act     makes it; called on every rank, with random numbers that are the same on all
    weight  relative frequency; most moves have 1
    basic   loops that are restricted to a few named moves still have it
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
    """Moves by name; a function's first docstring line describes the move."""

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
    """In half of the cases rank 0, which decides."""
    return chance.choice([0, chance.randrange(loop.size)])


BROKEN: dict[str, str] = {}
"""Moves that are known to break the library, and how. They are not drawn. Empty, unless something has to be fixed."""
