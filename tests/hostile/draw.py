"""What a seed stands for: a store, a Checkpointer, a job, and the moves that are made on them."""

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
HELD = Pace(blocks=1, bytes_per_s=1)  # the first request goes out, the others when a thread waits for them
TRICKLE = Pace(blocks=1, bytes_per_s=100 * MIB)
MOVES_MAX = 14

SHARING = frozenset({"share-memory", "put-into-a-queue", "cut-a-file"})
"""Moves after which memory is in part not this process's own, which is refused where every write has to be found."""

@dataclass(frozen=True, slots=True)
class Setup:
    """How a loop saves.

    pace      of captures while no thread waits; None: as the library has it
    in_place  whether loads read straight into memory at the file's phase
    exact     memory in which not every write can be found is refused: none is strided or shared. Else, as by default,
              samples are compared in such memory, and every write is found in the rest
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
class Drawn:
    """A seed, unfolded. Each move has a seed of its own, so that it does the same without those before it."""

    seed: int
    setup: Setup
    moves: tuple[tuple[str, int], ...]

    def only(self, positions: Collection[int]) -> Drawn:
        return dataclasses.replace(self, moves=tuple(self.moves[at] for at in sorted(positions)))


def draw(seed: int, names: Sequence[str] | None = None) -> Drawn:
    """What `seed` stands for. `names`: draw from these moves alone, beside those that every loop makes.

    Where all are drawn from, each seed has a move whose turn it is, twice, in a loop that has what it needs: however
    many moves there are, and whatever their weights, as many seeds make every one.
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
    drawn.insert(first, ("save", chance.randrange(1 << 32)))  # nothing happens before there is one
    if in_turn is not None:  # into that capture, before much has changed the state, and once checkpoints are there
        drawn.insert(first + 1, (in_turn.name, chance.randrange(1 << 32)))
        drawn.insert(chance.randint(first + 2, len(drawn)), (in_turn.name, chance.randrange(1 << 32)))
    return Drawn(seed, setup, tuple(drawn))


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
    """Whether what the move leaves can be saved."""
    return not (setup.exact and move.name in SHARING)
