"""The setup that a seed determines: a job of several ranks, their moves, and each restart with its number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

import flowstone as fs
from flowstone.config import Backend, Direct
from flowstone.store.base import Pace
from hostile.draw import HELD, MIB, TRICKLE
from hostile.ranks.moves import BROKEN, MOVES, Ending
from hostile.ranks.states import BESIDE, STEPPING, TRAINED

SIZES = (4, 3, 2, 5)
MOVES_MAX = 9
NAMED_WEIGHT = 10  # of moves that are selected by name
DEADLINE_S = 6.0  # a rank that is silent for half of it counts as dead


@dataclass(frozen=True, slots=True)
class Setup:
    """What the job saves, and how. `seed` is that of its weights."""

    kinds: tuple[str, ...]
    large: bool
    optimizer: str
    seed: int
    stepped: bool  # before the first save
    pace: Pace | None
    backend: Backend
    direct: Direct
    in_place: bool
    budget_bytes: int
    saves_in_flight: int
    on_error: str
    keep: fs.Keep | None
    in_memory: bool

    def engine(self) -> fs.EngineOptions:
        return fs.EngineOptions(
            backend=self.backend, direct=self.direct, queue_depth=4, workers=1, read_in_place=self.in_place,
            request_bytes=2 * MIB,
        )


@dataclass(frozen=True, slots=True)
class Life:
    """The job from a start to its end: the number of ranks, their moves (position, name, seed), and how it ends."""

    size: int
    moves: tuple[tuple[int, str, int], ...]
    ending: Ending


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """A decoded seed. Each move has a seed of its own, so that it does the same if earlier moves are left out."""

    seed: int
    setup: Setup
    moves: tuple[tuple[str, int], ...]
    size: int = 4

    def only(self, positions: Collection[int]) -> LoopPlan:
        return dataclasses.replace(self, moves=tuple(self.moves[position] for position in sorted(positions)))

    def lives(self) -> list[Life]:
        """The moves, divided after each move that ends the job, whose seed determines the size of the next job."""
        collected, size, begun = [], self.size, 0
        for index, (name, seed) in enumerate(self.moves):
            ending = MOVES[name].ending
            if ending is not Ending.NONE:
                collected.append(Life(size, self._numbered(begun, index + 1), ending))
                size, begun = Random(seed).choice([other for other in SIZES if other != size]), index + 1
        return [*collected, Life(size, self._numbered(begun, len(self.moves)), Ending.NONE)]

    def _numbered(self, begin: int, end: int) -> tuple[tuple[int, str, int], ...]:
        return tuple((index, *self.moves[index]) for index in range(begin, end))


def draw(seed: int, names: Sequence[str] | None = None, size: int = 4) -> LoopPlan:
    """The setup of `seed`. `names`: draw only these moves, and those that every loop makes."""
    chance = Random(f"hostile ranks {seed}")
    setup = _setup(chance)
    table = [move for move in MOVES.values() if move.basic or names is None or move.name in names]
    table = [move for move in table if names is not None or move.name not in BROKEN]
    count = chance.randint(3, MOVES_MAX)
    weights = [NAMED_WEIGHT * move.weight if names and move.name in names else move.weight for move in table]
    drawn = chance.choices(table, weights, k=count)
    moves = [(move.name, chance.randrange(1 << 32)) for move in drawn]
    moves.insert(chance.randint(0, 1), ("save", chance.randrange(1 << 32)))
    return LoopPlan(seed, setup, tuple(moves), size)


def _setup(chance: Random) -> Setup:
    trained = chance.sample(TRAINED, chance.choice([1, 1, 2, 3]))
    return Setup(
        kinds=(*trained, *(kind for kind in BESIDE if chance.random() < 0.3)),
        large=chance.random() < 0.5,
        optimizer=chance.choice(STEPPING),
        seed=chance.randrange(1 << 30),
        stepped=chance.random() < 0.7,
        pace=chance.choices([HELD, TRICKLE, None], [4, 1, 2])[0],
        backend=chance.choice(["auto", "posix"]),
        direct=chance.choice(["auto", "off"]),
        in_place=chance.random() < 0.5,
        budget_bytes=chance.choice([4, 32]) * MIB,
        saves_in_flight=chance.randint(1, 3),
        on_error=chance.choice(["raise", "continue"]),
        keep=chance.choice([None, None, None, fs.Keep(last=1), fs.Keep(last=2)]),
        in_memory=chance.random() < 0.8,
    )
