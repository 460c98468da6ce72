"""A job with two tiers is cut off at each call that changes either of them; then the promises of docs/ORDERING.md hold.

The tiers' threads are calls here, so that every run makes the same changes in the same order. Both stores are durable
when a call returns, so they contain exactly the changes that the process has made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
from msgspec.structs import replace
from test_store_simulation import Connection

import flowstone as fs
from flowstone.commit import catalog
from flowstone.commit.entries import EntryKind, parse_entry, step_directory
from flowstone.commit.publish import Draft
from flowstone.errors import FlowstoneError
from flowstone.store.base import Store
from flowstone.store.memory.store import MemoryStore, SharedMemoryDirectory
from flowstone.tiered import flush

sys.path.insert(0, str(Path(__file__).parent.parent / "tiered"))

from simulated import ENGINE, simulated


@dataclass(slots=True)
class Told:
    """Steps that were reported committed, and begun; and the step of a rewind that was begun."""

    committed: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    rewinding: int | None = None


@dataclass(slots=True, eq=False)
class World:
    """Two tiers of one run, as they are in between jobs. `rename`: how each commits."""

    rename: tuple[bool, bool]
    contents: tuple[SharedMemoryDirectory, SharedMemoryDirectory] = field(
        default_factory=lambda: (SharedMemoryDirectory(), SharedMemoryDirectory())
    )

    def stores(self, connection: Connection) -> list[fs.Tier]:
        near, far = (
            connection.store(content, atomic_rename=rename, location=name)
            for content, rename, name in zip(self.contents, self.rename, ("near", "far"), strict=True)
        )
        for item in (near, far):  # these outlive the job
            item.inner.capabilities = replace(item.inner.capabilities, volatile=False)  # type: ignore[misc]
        return [fs.Tier(near, keep=2), fs.Tier(far, keep=2)]

    def end(self) -> None:
        """The process is gone, and so are its locks."""
        for content in self.contents:
            content.writer, content.holder = None, ""

    def copy(self) -> World:
        """The same again: no file of a store is ever changed."""
        near, far = SharedMemoryDirectory(), SharedMemoryDirectory()
        for made, content in zip((near, far), self.contents, strict=True):
            made.files, made.directories = dict(content.files), set(content.directories)
        return World(self.rename, (near, far))

    def look(self, number: int) -> MemoryStore:
        return MemoryStore(self.contents[number], atomic_rename=self.rename[number])


def _state(step: int) -> dict[str, object]:
    return {"weights": torch.full((24_000,), float(step)), "step": step}


def _save(checkpointer: fs.Checkpointer, events: Told, step: int) -> None:
    events.begun.append(step)
    checkpointer.save(step, _state(step)).committed.result()
    events.committed.append(step)
    checkpointer._saves.sole_writer.drain()


def _first(checkpointer: fs.Checkpointer, events: Told) -> None:
    _save(checkpointer, events, 1)


def _retention(checkpointer: fs.Checkpointer, events: Told) -> None:
    _save(checkpointer, events, 4)


def _rewind(checkpointer: fs.Checkpointer, events: Told) -> None:
    events.rewinding = 2
    checkpointer.rewind(2)
    events.committed = [2]
    _save(checkpointer, events, 3)


SCENARIOS: dict[str, tuple[Callable[[fs.Checkpointer, Told], None], tuple[int, ...]]] = {
    "first_flush": (_first, ()), "flush_and_retention": (_retention, (2, 3)), "rewind": (_rewind, (1, 2, 3)),
}


def _prepared(rename: tuple[bool, bool], before: tuple[int, ...]) -> tuple[World, Told]:
    world, events = World(rename), Told()
    with fs.Checkpointer(world.stores(Connection()), engine=ENGINE) as checkpointer:
        for step in before:
            _save(checkpointer, events, step)
    world.end()
    return world, events


def _cut(world: World, events: Told, act: Callable[[fs.Checkpointer, Told], None], connection: Connection) -> None:
    """Run the job until it is cut off, and let its process end."""
    checkpointer = fs.Checkpointer(world.stores(connection), engine=ENGINE, on_error="continue")
    with suppress(FlowstoneError):
        act(checkpointer, events)
    with suppress(FlowstoneError):
        checkpointer.close()
    world.end()


def _check(world: World, events: Told, where: str) -> None:
    steps = [catalog.steps(world.look(number)) for number in (0, 1)]
    for number in (0, 1):
        for step in steps[number]:
            assert fs.open(world.look(number), step).verify().sound, f"{where}: {number} has half of step {step}"
    into = _state(-1)
    with fs.Checkpointer(world.stores(Connection()), engine=ENGINE) as checkpointer:
        newest = checkpointer.latest()
        if newest is None:
            assert not events.committed, f"{where}: {events.committed} were committed, and nothing is there"
        else:
            least = max(events.committed, default=-1) if events.rewinding is None else events.rewinding
            assert newest.step >= least, f"{where}: {newest}, of {events.committed}"
            assert newest.step in {*events.begun, *events.committed, 2, 3}, where
            assert checkpointer.load(into).step == newest.step, where
            assert torch.equal(into["weights"], _state(newest.step)["weights"]), where  # type: ignore[arg-type]
            if events.rewinding is not None:
                checkpointer.rewind(events.rewinding)
        after = 10
        _save(checkpointer, events, after)
    world.end()
    steps = [catalog.steps(world.look(number)) for number in (0, 1)]
    assert after in steps[0], where
    assert after in steps[1], f"{where}: the farther tier has caught up"
    if events.rewinding is not None:
        assert not {3, 4} & {*steps[0], *steps[1]}, f"{where}: {steps}, after going back to 2"
    for number in (0, 1):
        left = [
            name for name in world.look(number).names() if (entry := parse_entry(name))
            and entry.kind is EntryKind.SAVING
        ]
        assert not left, f"{where}: {left} are left"
        for step in steps[number]:
            assert fs.open(world.look(number), step).verify().sound, where


@pytest.mark.parametrize(("rename", "after"), [
    pytest.param((True, True), False, id="dirs"), pytest.param((True, False), True, id="dir-put-answer-lost"),
    pytest.param((False, True), False, id="put-dir"),
])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_job_that_is_cut_off_at_any_change(scenario: str, after: bool, rename: tuple[bool, bool]) -> None:
    act, before = SCENARIOS[scenario]
    with simulated():
        prepared, known = _prepared(rename, before)
        whole = Connection()
        _cut(prepared.copy(), Told(list(known.committed)), act, whole)
        assert whole.count > 10, "the job changes something"
        for index in range(whole.count):
            world, events = prepared.copy(), Told(list(known.committed), list(known.begun))
            connection = Connection(at=index, after=after)
            _cut(world, events, act, connection)
            assert connection.is_cut, f"{scenario}: there is no change {index}"
            _check(world, events, f"{scenario}, cut {'after' if after else 'before'} change {index}")


# A mutant: the simulation can fail.


def _is_found_out(scenario: str) -> bool:
    try:
        test_a_job_that_is_cut_off_at_any_change(scenario, False, (True, True))
    except (AssertionError, FlowstoneError):
        return True
    return False


def test_a_flush_that_commits_before_it_copies_is_found_out() -> None:
    def early(source: Store, target: Store, draft: Draft, *_: object) -> int:
        manifest = source.read(f"{step_directory(draft.step)}/manifest.json")
        target.make_directory(step_directory(draft.step))
        target.put(f"{step_directory(draft.step)}/manifest.json", manifest)
        return 0

    with mock.patch.object(flush, "_segments", early):
        assert _is_found_out("first_flush")
