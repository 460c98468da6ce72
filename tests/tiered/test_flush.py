"""A flush between every pair of stores: the same checkpoint, by the target's own commit, and no other files left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated import ENGINE, is_of, state

import flowstone as fs
from flowstone.commit import catalog, publish
from flowstone.commit.entries import step_directory
from flowstone.errors import (
    CancelledError,
    FullError,
    NoCheckpointError,
    StepExistsError,
    StorageError,
    UnsupportedFormatError,
)
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.store.base import UNPACED, Store
from flowstone.store.local import LocalStore
from flowstone.store.memory import MemoryStore
from flowstone.store.wrap import FaultInjectingStore
from flowstone.tiered.copying import SourceFailedError
from flowstone.tiered.flush import flush
from forge import edit_manifest

KINDS: dict[str, Callable[[Path], Store]] = {
    "directory": lambda path: LocalStore(path, ENGINE),
    "memory": lambda path: MemoryStore(location=str(path), options=ENGINE),
    "objects": lambda path: MemoryStore(location=str(path), options=ENGINE, atomic_rename=False),
}


def _nothing() -> None: ...


@pytest.fixture(params=[(a, b) for a in KINDS for b in KINDS], ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, Store]:
    """Two stores; the first one is a job's."""
    return KINDS[request.param[0]](tmp_path / "near"), KINDS[request.param[1]](tmp_path / "far")


def _saved(near: Store, *steps: int, compress: str = "off", elements: int = 300_000) -> None:
    options = fs.EngineOptions(request_bytes=2 << 20, workers=1, compress=compress)  # type: ignore[arg-type]
    with fs.Checkpointer(_Open(near), engine=options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step, elements)).committed.result()


class _Open(FaultInjectingStore):
    """The same store, which stays open when a Checkpointer closes it."""

    def close(self) -> None:
        self.inner.unlock()


def _prepared(near: Store, far: Store) -> None:
    far.make_directory()
    far.lock("the test")
    publish.open_store(far, publish.read_marker(near).store)


def _files(store: Store, directory: str) -> dict[str, bytes]:
    return {name: store.read(f"{directory}/{name}") for name in store.names(directory)}


def test_a_flushed_checkpoint_is_the_same_one(pair: tuple[Store, Store]) -> None:
    near, far = pair
    _saved(near, 1, 2)
    _prepared(near, far)
    made = flush(near, far, 2, UNPACED, _nothing)
    assert catalog.steps(far) == (2,)
    assert _files(near, step_directory(2)) == _files(far, step_directory(2))
    assert fs.open(far).verify().sound
    assert made.bytes == sum(row.bytes for row in made.manifest.segments)
    assert flush(near, far, 2, UNPACED, _nothing).bytes == 0, "it is there already"
    assert not [name for name in far.names() if name.startswith(".saving")]


def test_more_bytes_than_the_buffers_hold(tmp_path: Path) -> None:
    near, far = (KINDS["memory"](tmp_path / name) for name in ("near", "far"))
    _saved(near, 1, elements=16_000_000)  # 64 MB, through buffers of 16
    _prepared(near, far)
    flush(near, far, 1, UNPACED, _nothing)
    assert fs.open(far).verify().sound
    assert _files(near, step_directory(1)) == _files(far, step_directory(1))


@pytest.mark.parametrize("compress", ["derived", "max"])
def test_what_is_encoded_is_copied_as_it_is(compress: str, tmp_path: Path) -> None:
    near, far = LocalStore(tmp_path / "near", ENGINE), LocalStore(tmp_path / "far", ENGINE)
    same = torch.randn(400_000)
    master = {"a": same, "b": same.clone(), "low": same.to(torch.bfloat16), "step": 1}
    options = fs.EngineOptions(request_bytes=2 << 20, workers=1, compress=compress)  # type: ignore[arg-type]
    with fs.Checkpointer(tmp_path / "near", engine=options) as checkpointer:
        for step in (1, 2, 3):
            same[:1000] += step
            master["step"] = step
            checkpointer.save(step, master).committed.result()
    _prepared(near, far)
    for step in (1, 2, 3):
        flush(near, far, step, UNPACED, _nothing)
        assert fs.open(far, step).verify().sound
        assert torch.equal(fs.open(far, step).read("low"), fs.open(near, step).read("low"))


@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_a_delta_is_linked_to_what_the_target_has_else_copied(kind: str, tmp_path: Path) -> None:
    near, far = LocalStore(tmp_path / "near", ENGINE), KINDS[kind](tmp_path / "far")
    model = torch.nn.Linear(600, 500)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    whole = {"model": model, "more": torch.zeros(300_000), "step": 0}
    with fs.Checkpointer(tmp_path / "near", engine=ENGINE) as checkpointer:
        for step in (1, 2, 3):
            whole["more"] += 1
            whole["step"] = step
            checkpointer.save(step, whole).committed.result()
    manifest = fs.open(near).manifest
    assert any(row.home for row in manifest.segments), "the last one is a delta"
    _prepared(near, far)
    first, *later = [flush(near, far, step, UNPACED, _nothing) for step in (2, 3)]
    assert first.bytes == sum(row.bytes for row in first.manifest.segments), "the target has nothing that it refers to"
    own = sum(row.bytes for row in manifest.segments if row.home is None)
    everything = sum(row.bytes for row in manifest.segments)
    assert later[0].bytes == (own if far.capabilities.links else everything)
    for step in (2, 3):
        assert fs.open(far, step).verify().sound
        assert torch.equal(fs.open(far, step).read("more"), torch.full((300_000,), float(step)))


def test_a_delta_is_copied_where_the_target_has_checkpoints_of_a_later_release(tmp_path: Path) -> None:
    near, far = LocalStore(tmp_path / "near", ENGINE), LocalStore(tmp_path / "far", ENGINE)
    state = {"model": torch.nn.Linear(600, 500).requires_grad_(False), "more": torch.zeros(300_000), "step": 0}
    with fs.Checkpointer(tmp_path / "near", engine=ENGINE) as checkpointer:
        for step in (1, 2, 3):
            state["more"] += 1
            checkpointer.save(step, state).committed.result()
    segments = fs.open(near).manifest.segments
    assert any(row.home for row in segments), "the last one is a delta"
    _prepared(near, far)
    flush(near, far, 2, UNPACED, _nothing)
    edit_manifest(tmp_path / "far" / step_directory(2), lambda manifest: manifest.update(flowstone=99))
    with pytest.raises(UnsupportedFormatError):
        fs.open(far, 2)
    made = flush(near, far, 3, UNPACED, _nothing)
    assert made.bytes == sum(row.bytes for row in segments)
    assert fs.open(far, 3).verify().sound


@pytest.mark.parametrize("part", ["chunk", "header", "index.safetensors", "objects.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_a_damaged_source_gives_no_checkpoint(kind: str, part: str, tmp_path: Path) -> None:
    near, far = LocalStore(tmp_path / "near", ENGINE), KINDS[kind](tmp_path / "far")
    _saved(near, 1)
    _prepared(near, far)
    directory = tmp_path / "near" / step_directory(1)
    name, offset = (part, 40) if "." in part else ("rank-00000.safetensors", 20 if part == "header" else 500_000)
    with (directory / name).open("r+b") as file:
        file.seek(offset)
        content = file.read(1)
        file.seek(offset)
        file.write(bytes([content[0] ^ 1]))
    with pytest.raises(SourceFailedError):
        flush(near, far, 1, UNPACED, _nothing)
    assert catalog.steps(far) == ()
    assert set(far.names()) <= {"flowstone.json", "flowstone.lock"}, "nothing is left"


def test_another_checkpoint_of_that_step_stays(tmp_path: Path) -> None:
    near, far, other = (LocalStore(tmp_path / name, ENGINE) for name in ("near", "far", "other"))
    _saved(near, 1)
    _prepared(near, far)
    flush(near, far, 1, UNPACED, _nothing)
    before = _files(far, step_directory(1))
    _saved(other, 1)
    with pytest.raises(StepExistsError, match="another checkpoint"):
        flush(other, far, 1, UNPACED, _nothing)
    assert _files(far, step_directory(1)) == before
    with pytest.raises(SourceFailedError, match="another checkpoint") as failed:
        flush(near, far, 1, UNPACED, _nothing, "0123456789abcdef")
    assert isinstance(failed.value.error, NoCheckpointError)


@pytest.mark.parametrize("kind", ["directory", "memory", "objects"])
def test_a_flush_that_is_called_off_or_refused_leaves_nothing(kind: str, tmp_path: Path) -> None:
    near, inner = KINDS["memory"](tmp_path / "near"), KINDS[kind](tmp_path / "far")
    _saved(near, 1, elements=8_000_000)
    _prepared(near, inner)
    calls = 0

    def rest() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise CancelledError("called off")

    with pytest.raises(CancelledError):
        flush(near, inner, 1, UNPACED, rest)
    assert set(inner.names()) <= {"flowstone.json", "flowstone.lock"}
    full = FullError("no space", errno=28)
    far = FaultInjectingStore(
        inner, before=lambda verb, path: full if verb == "put" and path.endswith("objects.json") else None
    )
    with pytest.raises(FullError):
        flush(near, far, 1, UNPACED, _nothing)
    assert set(inner.names()) <= {"flowstone.json", "flowstone.lock"}
    lost = StorageError("lost", errno=110)
    far = FaultInjectingStore(inner, before=lambda verb, path: lost if verb == "written" else None)
    with pytest.raises(StorageError, match="lost"):
        flush(near, far, 1, UNPACED, _nothing)
    flush(near, inner, 1, UNPACED, _nothing)
    into = state(0, 8_000_000)
    with fs.Checkpointer(_Open(inner), engine=ENGINE) as checkpointer:
        assert checkpointer.load(into).step == 1
    assert into["step"] == 1


def test_a_write_that_fails_midway_ends_the_flush(tmp_path: Path) -> None:
    """The engine's own fault, while most of the source is still to be read."""
    near, far = KINDS["memory"](tmp_path / "near"), LocalStore(tmp_path / "far", ENGINE)
    _saved(near, 1, elements=8_000_000)
    _prepared(near, far)
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        with pytest.raises(StorageError):
            flush(near, far, 1, UNPACED, _nothing)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [name for name in os.listdir(tmp_path / "far") if name.startswith((".saving", "step"))]


def test_a_cap_is_kept(tmp_path: Path) -> None:
    """By the engine: 8 MB at 16 MB/s."""
    from time import monotonic

    from flowstone.store.base import Pace

    near, far = KINDS["memory"](tmp_path / "near"), KINDS["memory"](tmp_path / "far")
    _saved(near, 1, elements=2_000_000)
    _prepared(near, far)
    began = monotonic()
    flush(near, far, 1, Pace(cap=16_000_000), _nothing)
    assert monotonic() - began >= 0.3  # the first of four windows begins at once


def test_rows_of_memory_that_is_used_again_are_captured_in_order() -> None:
    """The native gate alone: no row is captured before it is offered."""
    from flowstone import _native

    feed = _native.SourceSupply(np.array([4096, 0, 4096], np.uint64))
    assert feed.await_captured(0, 0.0) == 0
    feed.offer(3)
    assert not feed.ended
    with pytest.raises(ValueError, match="more rows"):
        feed.offer(4)


def test_the_copy_is_read_back_bit_for_bit(pair: tuple[Store, Store]) -> None:
    near, far = pair
    _saved(near, 5)
    _prepared(near, far)
    flush(near, far, 5, UNPACED, _nothing)
    far.unlock()
    into = state(0)
    with fs.Checkpointer(_Open(far), engine=ENGINE) as checkpointer:
        checkpointer.load(into)
    assert is_of(5, into)
    assert far.exists(f"{step_directory(5)}/{MANIFEST_NAME}")
