"""A tuned store uses its tuned settings, and moves the same bytes."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import flowstone as fs
from flowstone import _native
from flowstone.commit import catalog, publish
from flowstone.config import BLOCK_BYTES, KIB, MIB, WORKERS_DEFAULT, Tuning
from flowstone.format.manifest import IoRecord
from flowstone.reading import checkpoint
from flowstone.store.local import LocalStore
from flowstone.store.mount import mount_of
from flowstone_study.cache import cached_pages, drop_cached
from tunings import READ_DEFAULTS, WRITE_DEFAULTS, put_beside_marker, put_for_mount

STATE_BYTES = 24 * MIB


@pytest.fixture(scope="module")
def state() -> Mapping[str, object]:
    """Three large tensors, one of them strided, and small ones."""
    noise = torch.Generator().manual_seed(1)
    large = [torch.randint(0, 256, (8 * MIB,), dtype=torch.uint8, generator=noise) for _ in range(3)]
    small = [torch.full((n,), n) for n in range(9)]
    return {"a": large[0], "b": large[1], "c": large[2].view(1024, -1).T, "small": small}


def save(store: Path, state: Mapping[str, object], **options: object) -> IoRecord:
    """Save as the next step; what the manifest says of it."""
    with fs.Checkpointer(store, **options) as checkpointer:  # type: ignore[arg-type]
        latest = checkpointer.latest()
        return checkpointer.save(1 if latest is None else latest.step + 1, state).committed.result().manifest.io


def needs_direct(path: Path) -> None:
    if not _native.probe_direct(str(path)):
        pytest.skip(f"the file system at {path} refuses O_DIRECT")


def test_manifest_tells_what_a_save_used_and_why(store: Path, state: Mapping[str, object]) -> None:
    plain = save(store, state)
    assert (plain.request_bytes, plain.queue_depth, plain.workers) == (8 * MIB, 16, WORKERS_DEFAULT)
    assert (plain.origin, plain.explicit) == ("default", ())
    tuning = Tuning("posix", queue_depth=3, request_bytes=2 * MIB, workers=1, in_place=False, direct_from_bytes=None)
    put_beside_marker(store, write=tuning)
    tuned = save(store, state)
    assert (tuned.backend, tuned.alignment) == ("posix", 1)
    assert (tuned.request_bytes, tuned.queue_depth, tuned.workers) == (2 * MIB, 3, 1)
    assert (tuned.origin, tuned.explicit) == ("tuned", ())
    mixed = save(store, state, engine=fs.EngineOptions(queue_depth=6))
    assert (mixed.request_bytes, mixed.queue_depth) == (2 * MIB, 6)
    assert (mixed.origin, mixed.explicit) == ("tuned", ("queue_depth",))
    everything = fs.EngineOptions(backend="posix", direct="off", queue_depth=1, request_bytes=4 * MIB, workers=1)
    explicit = save(store, state, engine=everything)
    assert explicit.origin == "explicit"
    assert explicit.explicit == ("backend", "direct", "queue_depth", "request_bytes", "workers")
    written = json.loads((store / "step-00000002/manifest.json").read_bytes())["io"]
    assert (written["workers"], written["origin"], written["explicit"]) == (1, "tuned", [])


def test_requests_are_as_long_as_tuned(store: Path, state: Mapping[str, object]) -> None:
    counts = {}
    for size in (2 * MIB, 16 * MIB):
        put_beside_marker(store, write=replace(WRITE_DEFAULTS, request_bytes=size))
        counts[size] = save(store, state).requests
    assert counts[2 * MIB] is not None
    assert counts[16 * MIB] is not None
    assert counts[2 * MIB] >= STATE_BYTES // (2 * MIB)
    assert counts[16 * MIB] <= STATE_BYTES // (2 * MIB) / 2


def test_reads_are_as_long_as_tuned_in_both_ways(
    store: Path, state: Mapping[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, state)
    reported = []
    scatter = checkpoint.scatter

    def heard(*arguments: object) -> object:
        result = scatter(*arguments)  # type: ignore[arg-type]
        reported.append(result.receipt)
        return result

    monkeypatch.setattr(checkpoint, "scatter", heard)
    for size, in_place in ((2 * MIB, False), (8 * MIB, False), (8 * MIB, True)):
        put_beside_marker(store, read=replace(READ_DEFAULTS, request_bytes=size, in_place=in_place))
        assert torch.equal(fs.open(store).read("a"), state["a"])  # type: ignore[arg-type]
    short, long, placed = reported
    assert short.requests > 2 * long.requests
    assert short.direct_bytes == long.direct_bytes == 0
    # In place where the new tensor happens to lie at the phase of the file, else as before.
    assert placed.direct_bytes + placed.copied_bytes == 8 * MIB


def test_small_totals_go_through_the_page_cache_where_that_was_found_faster(
    store: Path, state: Mapping[str, object], tmp_path: Path
) -> None:
    needs_direct(tmp_path)
    put_beside_marker(store, write=replace(WRITE_DEFAULTS, direct_from_bytes=MIB))
    assert save(store, {"x": torch.ones(1000)}).alignment == 1
    assert save(store, state).alignment == BLOCK_BYTES
    assert save(store, {"x": torch.ones(1000)}, engine=fs.EngineOptions(direct="on")).alignment == BLOCK_BYTES


def test_checks_read_the_device_even_where_loads_are_buffered(store: Path, state: Mapping[str, object]) -> None:
    """Else `verify` would praise what memory holds of a file that the disk has lost."""
    store.mkdir()
    needs_direct(store)
    save(store, state)
    segment = store / "step-00000001/rank-00000.safetensors"
    put_beside_marker(store, read=replace(READ_DEFAULTS, direct_from_bytes=None))
    assert drop_cached([segment]), "this file system keeps files in memory"
    assert fs.open(store).verify().sound
    pages = STATE_BYTES // BLOCK_BYTES
    assert cached_pages(segment) < pages // 10, "more than a header went through the page cache"
    fs.open(store).read("a")
    assert cached_pages(segment) >= pages // 3


def test_directions_share_an_engine_only_where_they_are_tuned_alike(store: Path, state: Mapping[str, object]) -> None:
    for write, read, engines in ((None, None, 1), (replace(WRITE_DEFAULTS, queue_depth=3), None, 2)):
        put_beside_marker(store, write=write, read=read)
        local = LocalStore(store)
        with fs.Checkpointer(local) as checkpointer:
            latest = checkpointer.latest()
            checkpointer.save(1 if latest is None else latest.step + 1, state)
            checkpointer.load({name: _blank(value) for name, value in state.items()})
            assert len(local._engines._engines) == engines
        assert not local._engines._engines, "closing stops them"


def test_tuning_does_not_make_a_budget_too_small(store: Path, state: Mapping[str, object]) -> None:
    put_beside_marker(store, write=replace(WRITE_DEFAULTS, request_bytes=64 * MIB))
    assert save(store, state, budget_bytes=32 * MIB).request_bytes == 8 * MIB
    assert save(store, state, budget_bytes=128 * MIB).request_bytes == 64 * MIB
    with fs.Checkpointer(store, budget_bytes=MIB) as checkpointer, pytest.raises(fs.BudgetError):
        checkpointer.save(9, state)


def test_engine_that_was_tuned_for_and_is_refused_gives_way(
    store: Path, state: Mapping[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_beside_marker(store, write=replace(WRITE_DEFAULTS, backend="io_uring"))
    monkeypatch.setattr(_native, "has_io_uring", lambda: False)
    assert save(store, state).backend == "posix"
    assert "says io_uring, but the system refuses io_uring" in caplog.text


def test_mounts_tuning_is_used_by_a_store_without_its_own(
    store: Path, state: Mapping[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    put_for_mount(tmp_path, write=replace(WRITE_DEFAULTS, queue_depth=3))
    assert save(store, state).queue_depth == 3
    put_beside_marker(store, write=replace(WRITE_DEFAULTS, queue_depth=4))
    assert save(store, state).queue_depth == 4


def test_a_store_copied_to_another_mount_leaves_its_tuning_behind(
    store: Path, small_disk: object, caplog: pytest.LogCaptureFixture
) -> None:
    put_beside_marker(store, write=replace(WRITE_DEFAULTS, queue_depth=3))
    assert save(store, {"x": torch.ones(9)}).queue_depth == 3
    other = small_disk(16 * MIB)  # type: ignore[operator]
    assert mount_of(other) != mount_of(store)
    shutil.copytree(store, other / "run")
    io = save(other / "run", {"x": torch.ones(9)})
    assert (io.queue_depth, io.origin) == (16, "default")
    assert "was measured on another" in caplog.text
    assert "flowstone bench tune" in caplog.text


def test_a_broken_tuning_does_not_stop_a_save(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_beside_marker(store, write=WRITE_DEFAULTS).write_text("{")
    assert save(store, {"x": torch.ones(9)}).origin == "default"
    fs.open(store).read("x")
    assert "tuning is ignored" in caplog.text


# It is no part of what a store holds


def test_a_directory_with_nothing_but_tuning_is_an_empty_store(store: Path) -> None:
    put_beside_marker(store)
    for marked in (False, True):
        if marked:
            publish.open_store(LocalStore(store))
        with fs.Checkpointer(store) as checkpointer:
            assert checkpointer.latest() is None
            with pytest.raises(fs.NoCheckpointError):
                checkpointer.load({"x": torch.ones(1)})
        with pytest.raises(fs.NoCheckpointError):
            fs.open(store)
    save(store, {"x": torch.ones(1)})
    assert fs.open(store).step == 1


def test_nothing_that_removes_touches_tuning(store: Path) -> None:
    path = put_beside_marker(store)
    before = path.read_bytes()
    (store / ".flowstone-tuning-dead").mkdir()
    (store / ".flowstone-tuning-dead/trial-1").write_bytes(b"left by a killed tuner")
    (store / ".tuning.json-dead").write_bytes(b"the same")
    for step in (1, 2, 3):
        with fs.Checkpointer(store, keep=fs.Keep(last=1)) as checkpointer:
            checkpointer.save(step, {"x": torch.ones(1)})
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.rewind(3)
    assert path.read_bytes() == before
    assert catalog.steps(LocalStore(store)) == (3,)
    assert not [name.name for name in store.iterdir() if name.name.startswith(".")], "leftovers are swept"


# Bytes

BACKENDS = ["posix", *(["io_uring"] if _native.has_io_uring() else [])]
TUNINGS = st.builds(
    Tuning, backend=st.sampled_from(BACKENDS), queue_depth=st.integers(1, 70),
    request_bytes=st.integers(512, 4096).map(lambda blocks: blocks * BLOCK_BYTES), workers=st.integers(1, 4),
    direct_from_bytes=st.sampled_from([0, None, 100 * KIB, 1 << 40]), in_place=st.booleans(),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(write=TUNINGS, read=TUNINGS, budget=st.sampled_from([32 * MIB, 64 * MIB, None]))
def test_every_tuning_writes_the_same_bytes_and_reads_them_back(
    tmp_path: Path, state: Mapping[str, object], write: Tuning, read: Tuning, budget: int | None
) -> None:
    store, names = tmp_path / "run", ("rank-00000.safetensors", "index.safetensors", "objects.json")
    reference = tmp_path / "reference"
    if not reference.exists():
        save(reference, state)
    shutil.rmtree(store, ignore_errors=True)
    put_beside_marker(store, write=write, read=read)
    save(store, state, budget_bytes=budget)
    for name in names:
        assert (store / "step-00000001" / name).read_bytes() == (reference / "step-00000001" / name).read_bytes(), name
    blank = {name: _blank(value) for name, value in state.items()}
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.load(blank)
    for name in ("a", "b", "c"):
        assert torch.equal(blank[name], state[name]), name  # type: ignore[arg-type]
    assert fs.open(store).verify().sound


def _blank(value: object) -> object:
    return [torch.zeros_like(v) for v in value] if isinstance(value, list) else torch.zeros_like(value)  # type: ignore[call-overload]
