"""Saves, rewinds, flushes and losses of memory in any order, by seed; checkpoints are identified by their ids.

There are two worlds: memory that is flushed into a store (`flush_to`, `flowstone flush`), where each flush may be cut
off at any change; and a list of two tiers, of which the farther one may be down. In both, no checkpoint that a rewind
has set aside becomes the newest again, and each checkpoint reported as durable is durable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import pytest
from msgspec.structs import replace
from test_store_simulation import Connection

import flowstone as fs
from flowstone.commit import catalog
from flowstone.commit.entries import REWOUND, step_directory
from flowstone.commit.manifests import read_manifest
from flowstone.errors import FlowstoneError, StepExistsError, StorageError
from flowstone.format.manifest import MARKER_NAME
from flowstone.store.base import Store
from flowstone.store.memory.store import MemoryStore, SharedMemoryDirectory
from flowstone.tiered import newest
from flowstone.tiered.newest import copy_newest

sys.path.insert(0, str(Path(__file__).parent.parent / "tiered"))

from simulated import ENGINE, Clock, Unsteady, simulated

OPERATIONS = 14
SEEDS, SOAK_SEEDS = range(20), range(20, 2000)


def _state(step: int) -> dict[str, object]:
    return {"weights": np.full(3000, step, np.int32), "step": step}


def _identities(store: Store) -> dict[int, str]:
    return {step: read_manifest(store, step_directory(step)).id for step in catalog.steps(store)}


def _notes(store: Store) -> set[str]:
    return {name for name in store.names() if name.startswith(REWOUND)}


class FlushedMemory:
    """Memory that is flushed into `disk`. `abandoned`: identities of what a rewind has set aside."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.memory, self.disk = SharedMemoryDirectory(), SharedMemoryDirectory()
        self.abandoned: set[str] = set()
        self.number = 0

    def act(self) -> None:
        acts = [self.save, self.save, self.rewind, self.flush, self.flush, self.lose_memory, self.save_beside]
        self.random.choice(acts)()
        self.memory.writer = self.disk.writer = None

    def source(self) -> MemoryStore:
        return MemoryStore(self.memory, location="memory")

    def target(self) -> MemoryStore:
        store = MemoryStore(self.disk, location="disk")
        store.capabilities = replace(store.capabilities, volatile=False)
        return store

    def _check_newest(self, store: Store) -> int:
        actual = _identities(store)
        if not actual:
            return 0
        step = max(actual)
        assert actual[step] not in self.abandoned, f"step {step} of {store.location} was set aside"
        assert fs.open(store, step=step).verify().sound
        return step

    def save(self) -> None:
        step = self._check_newest(self.source()) + 1
        if step == 1:
            step = self._check_newest(self.target()) + 1
            self._adopt()
        self.number += 1
        with fs.Checkpointer(self.source(), keep=4, engine=ENGINE) as checkpointer:
            checkpointer.save(step, _state(self.number)).committed.result()

    def _adopt(self) -> None:
        """As NodeMemory does: a run that is new in memory is that of the store into which it is flushed."""
        source, target = self.source(), self.target()
        if target.exists(MARKER_NAME) and not source.exists(MARKER_NAME):
            source.make_directory()
            for name in (*sorted(_notes(target)), MARKER_NAME):
                source.put(name, target.read(name))

    def rewind(self) -> None:
        actual = _identities(self.source())
        if len(actual) < 2:
            return
        step = self.random.choice(sorted(actual)[:-1])
        with fs.Checkpointer(self.source(), engine=ENGINE) as checkpointer:
            checkpointer.rewind(step)
        known = {**_identities(self.target()), **actual}
        self.abandoned |= {identity for key, identity in known.items() if key > step} | {
            identity for key, identity in _identities(self.target()).items() if key > step
        }
        self.memory.writer = None
        self.flush()

    def flush(self) -> None:
        actual = _identities(self.source())
        if not actual:
            return
        position = self.random.choice([None, self.random.randrange(14)])
        connection = Connection(position, after=self.random.random() < 0.5)
        target = connection.store(self.disk, atomic_rename=True, location="disk")
        target.inner.capabilities = self.target().capabilities  # type: ignore[misc]
        try:
            copied = copy_newest(self.source(), target, "a flush")
        except StorageError:
            assert connection.is_cut
        else:
            assert copied is not None
            assert (copied.step, copied.id) == (max(actual), actual[max(actual)])
            assert _identities(self.target())[copied.step] == copied.id
            assert fs.open(self.target(), step=copied.step).verify().sound
            self._check_newest(self.target())
        self.disk.writer = None

    def lose_memory(self) -> None:
        if _notes(self.source()) - _notes(self.target()):
            self.abandoned -= {*_identities(self.target()).values()}  # that rewind was told not to have come there
        self.memory = SharedMemoryDirectory()
        self._check_newest(self.target())

    def save_beside(self) -> None:
        """A job saves into the disk alone, after going back; what memory has is of before that then."""
        actual = _identities(self.target())
        if len(actual) < 2 or actual[max(actual)] in self.abandoned:
            return
        step = self.random.choice(sorted(actual)[:-1])
        with fs.Checkpointer(self.target(), engine=ENGINE) as checkpointer:
            checkpointer.rewind(step)
            self.number += 1
            checkpointer.save(step + 1, _state(self.number)).committed.result()
        before = _identities(self.target())
        if max(_identities(self.source()), default=-1) > step:
            with suppress(StepExistsError):
                copy_newest(self.source(), self.target(), "a flush")
            assert _identities(self.target()) == before, "nothing of before the rewind has come"
        self.abandoned |= {identity for key, identity in actual.items() if key > step}
        self.memory = SharedMemoryDirectory()


class TwoTiers:
    """A job with memory and a farther tier, which may be down; it ends, or is killed, and its memory may be lost."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random, self.clock = Random(seed), clock
        self.contents = [SharedMemoryDirectory(), SharedMemoryDirectory()]
        self.abandoned: set[str] = set()
        self.lineage: dict[int, str] = {}
        self.saves: list[fs.Save] = []
        self.number = 0
        self._start()

    def store(self, number: int) -> MemoryStore:
        store = MemoryStore(self.contents[number], location=("near", "far")[number])
        store.capabilities = replace(store.capabilities, volatile=number == 0)
        return store

    def _start(self) -> None:
        self.stores = [Unsteady(self.store(number)) for number in (0, 1)]
        tiers = [fs.Tier(self.stores[0], keep=4), fs.Tier(self.stores[1], keep=4, lag=2)]
        self.job = fs.Checkpointer(tiers, engine=ENGINE)
        self.saves = []
        newest_one = self.job.latest()
        if newest_one is not None:
            assert newest_one.manifest.id not in self.abandoned, f"{newest_one} was set aside"
            self.lineage = {key: item for key, item in self.lineage.items() if key <= newest_one.step}
            self.lineage[newest_one.step] = newest_one.manifest.id
        else:
            self.lineage = {}

    def act(self) -> None:
        self.random.choice([self.save, self.save, self.save, self.rewind, self.turn, self.wait, self.restart])()
        for save in self.saves:
            if save.durable.done() and save.durable.exception() is None:
                came = save.durable.result().manifest
                assert came.id == save.committed.result().manifest.id, f"another step {save.step} is durable"

    def save(self) -> None:
        step = max(self.lineage, default=0) + 1
        self.number += 1
        save = self.job.save(step, _state(self.number))
        self.lineage[step] = save.committed.result().manifest.id
        self.job._saves.sole_writer.drain()
        self.saves.append(save)
        if save.durable.done() and save.durable.exception() is None:
            assert _identities(self.store(1))[step] == self.lineage[step], "what is durable is there"

    def rewind(self) -> None:
        here = [step for step in catalog.steps(self.store(0)) if step < max(self.lineage, default=0)]
        if not here:
            return
        step = self.random.choice(here)
        self.job.rewind(step)
        everywhere = {*_identities(self.store(1)).items(), *self.lineage.items()} if self.stores[1].down else {
            *self.lineage.items()
        }
        self.abandoned |= {identity for position, identity in everywhere if position > step}
        self.lineage = {key: identity for key, identity in self.lineage.items() if key <= step}

    def turn(self) -> None:
        self.stores[1].down = not self.stores[1].down

    def wait(self) -> None:
        self.clock.advance(400.0)

    def restart(self) -> None:
        """In order, or not; with the memory, or without."""
        if self.random.random() < 0.5:
            for store in self.stores:
                store.down = True  # it is killed
        with suppress(FlowstoneError):
            self.job.close()
        for content in self.contents:
            content.writer, content.holder = None, ""
        if self.random.random() < 0.4:
            near, far = self.store(0), self.store(1)
            if _notes(near) - _notes(far):
                self.abandoned -= {*_identities(far).values()}  # it was down at that rewind, and the note is lost
            self.contents[0] = SharedMemoryDirectory()
        self._start()

    def end(self) -> None:
        self.stores[1].down = False
        self.job.close()


def _play_flushes(seed: int) -> None:
    world = FlushedMemory(seed)
    for _ in range(OPERATIONS):
        world.act()


def _play_tiers(seed: int) -> None:
    with simulated() as clock:
        world = TwoTiers(seed, clock)
        for _ in range(OPERATIONS):
            world.act()
        world.end()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("play", [_play_flushes, _play_tiers], ids=["flushes", "tiers"])
def test_what_was_set_aside_stays_aside_and_durable_is_what_is(play: Callable[[int], None], seed: int) -> None:
    play(seed)


@pytest.mark.soak
@pytest.mark.parametrize("play", [_play_flushes, _play_tiers], ids=["flushes", "tiers"])
def test_what_was_set_aside_stays_aside_in_many_orders(play: Callable[[int], None]) -> None:
    for seed in SOAK_SEEDS:
        try:
            play(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


# Mutants: the simulation can fail.


def _is_found_out(play: Callable[[int], None]) -> bool:
    for seed in SEEDS:
        try:
            play(seed)
        except (AssertionError, FlowstoneError):
            return True
    return False


def test_a_flush_that_follows_no_rewind_is_found_out() -> None:
    with mock.patch.object(newest, "_follow_rewinds", return_value=()):
        assert _is_found_out(_play_flushes)


def test_a_rewind_without_a_note_is_found_out() -> None:
    with mock.patch("flowstone.commit.catalog.write_rewind_note", return_value=None):
        assert _is_found_out(_play_flushes)
