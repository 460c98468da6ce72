"""The setup that a seed determines: a store, a Checkpointer, a job, and the moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

import flowstone as fs
from flowstone.config import Backend, Direct
from flowstone.store.base import Pace
from hostile.moves import BROKEN, MOVES, Move
from hostile.states import OPTIMIZERS

MIB = 1 << 20
HELD = Pace(blocks=1, bytes_per_s=1)  # the first request is sent, the others when a thread waits for them
TRICKLE = Pace(blocks=1, bytes_per_s=100 * MIB)
MOVES_MAX = 14

SHARING = frozenset({"share-memory", "put-into-a-queue", "cut-a-file"})
"""Moves after which memory is shared or mapped, which `exact` refuses because it cannot detect every write there."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a loop saves.

    pace      of captures while no thread waits; None: the library's default
    in_place  whether loads read directly into memory that has the phase of the file
    exact     memory in which not every write can be detected is refused, so no tensor is strided or shared. The default
              compares samples in such memory, and detects every write in other memory
    """

    in_memory: bool
    pace: Pace | None
    backend: Backend
    direct: Direct
    queue_depth: int
    workers: int
    in_place: bool
    exact: bool
    budget_bytes: int
    saves_in_flight: int
    on_error: str
    keep: fs.Keep | None
    kind: str
    extras: tuple[str, ...]
    job_seed: int

    def engine(self) -> fs.EngineOptions:
        return fs.EngineOptions(
            backend=self.backend, direct=self.direct, queue_depth=self.queue_depth, workers=self.workers,
            read_in_place=self.in_place, request_bytes=2 * MIB, watch="exact" if self.exact else "auto",
        )


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """A decoded seed. Each move has a seed of its own, so that it does the same if earlier moves are left out."""

    seed: int
    setup: Setup
    moves: tuple[tuple[str, int], ...]

    def only(self, positions: Collection[int]) -> LoopPlan:
        return dataclasses.replace(self, moves=tuple(self.moves[position] for position in sorted(positions)))


def draw(seed: int, names: Sequence[str] | None = None) -> LoopPlan:
    """The setup of `seed`. `names`: draw only these moves, and those that every loop makes.

    If all moves are allowed, each seed makes one particular move twice, in a loop that supports it. So as many seeds as
    there are moves cover every move, whatever their weights.
    """
    chance = Random(f"hostile {seed}")
    in_turn = _in_turn(seed) if names is None else None
    setup = _setup(chance)
    while in_turn is not None and not _suits(in_turn, setup):
        setup = _setup(chance)
    table = [move for move in MOVES.values() if move.basic or names is None or move.name in names]
    table = [move for move in table if _may(move, setup) and (names is not None or move.name not in BROKEN)]
    weights = [move.weight for move in table]
    count = chance.randint(4, MOVES_MAX)
    drawn = [(move.name, chance.randrange(1 << 32)) for move in chance.choices(table, weights, k=count)]
    first = chance.randint(0, 2)
    drawn.insert(first, ("save", chance.randrange(1 << 32)))  # other moves do nothing before the first save
    if in_turn is not None:  # during that capture, before much has changed the state, and when there are checkpoints
        drawn.insert(first + 1, (in_turn.name, chance.randrange(1 << 32)))
        drawn.insert(chance.randint(first + 2, len(drawn)), (in_turn.name, chance.randrange(1 << 32)))
    return LoopPlan(seed, setup, tuple(drawn))


def _in_turn(seed: int) -> Move:
    turns = [move for move in MOVES.values() if move.name not in BROKEN]
    return turns[seed % len(turns)]


def _suits(move: Move, setup: Setup) -> bool:
    has = {"", *setup.extras, setup.kind, "" if setup.kind == "plain" else "slots"}
    return _may(move, setup) and move.needs in has


def _setup(chance: Random) -> Setup:
    extras = ["average", "scheduler", "plain", "array", "rng", "views", "nested"]
    return Setup(
        in_memory=chance.random() < 0.8,
        pace=chance.choices([HELD, TRICKLE, None], [8, 1, 1])[0],
        backend=chance.choice(["auto", "posix"]),
        direct=chance.choice(["auto", "off"]),
        queue_depth=chance.choice([1, 4, 16]),
        workers=chance.randint(1, 2),
        in_place=chance.random() < 0.5,
        exact=chance.random() < 0.5,
        budget_bytes=chance.choice([4, 4, 8, 32]) * MIB,
        saves_in_flight=chance.randint(1, 3),
        on_error=chance.choice(["raise", "continue"]),
        keep=chance.choice([None, None, None, fs.Keep(last=1), fs.Keep(last=2), fs.Keep(last=1, every=3)]),
        kind=chance.choice([*OPTIMIZERS, "adamw-two", "sgd-two"]),
        extras=tuple(extra for extra in extras if chance.random() < 0.3),
        job_seed=chance.randrange(1 << 32),
    )


def _may(move: Move, setup: Setup) -> bool:
    """Whether the state can be saved after the move."""
    return not (setup.exact and move.name in SHARING)
