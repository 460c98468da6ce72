"""Loads of many small tensors, which are read while the state is walked: only the time differs."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

import flowstone as fs
from flowstone.state import Restoration, prepare
from flowstone.store.base import ReadHandle
from flowstone.store.local import LocalStore
from flowstone.store.local_io import LocalReadHandle
from flowstone.store.memory import MemoryStore
from flowstone.store.wrap import TracingStore
from forge import edit_manifest, flip, place_of

COUNT, ELEMENTS = 600, 10_000  # 24 MB in pieces of 40 KB
WAIT_S = 60.0


class Watched(LocalStore):
    """Keeps the readings of a load, and whether each began ahead of the walk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.readings: list[LocalReadHandle] = []
        self.ahead: list[bool] = []

    def read_extents(self, *arguments: object, **more: object) -> LocalReadHandle:  # type: ignore[override]
        self.ahead.append(bool(more.get("ahead")))
        self.readings.append(super().read_extents(*arguments, **more))  # type: ignore[arg-type]
        return self.readings[-1]


@contextmanager
def _during_the_walk(happens: Callable[[], object]) -> Iterator[None]:
    """Something happens when a load has walked over the state, and has compared nothing yet."""

    def walked(*given: object, **named: object) -> Restoration:
        restoration = prepare(*given, **named)  # type: ignore[arg-type]
        happens()
        return restoration

    with mock.patch("flowstone.reading.compare.prepare", walked):
        yield


def _model(value: float | None = None) -> dict[str, torch.Tensor]:
    """Tensors that differ from each other, or all of one value."""
    fresh = torch.arange(COUNT * ELEMENTS, dtype=torch.float32).view(COUNT, ELEMENTS)
    return {f"{i}": fresh[i].clone() if value is None else torch.full((ELEMENTS,), value) for i in range(COUNT)}


def _same(tensors: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in tensors.items())


def _untouched(state: Mapping[str, torch.Tensor], value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in state.values())


@pytest.fixture
def watched(store: Path) -> Iterator[Watched]:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": _model(), "step": 7})
    opened = Watched(store)
    yield opened
    opened.close()


def _segment(watched: Watched) -> Path:
    return watched.root / "step-00000001" / "rank-00000.safetensors"


def _left_over(watched: Watched) -> list[str]:
    """Threads of reads, and open segments. The kernel lists a thread for an instant after it was joined."""
    deadline = time.monotonic() + WAIT_S
    while (left := _there(watched)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _there(watched: Watched) -> list[str]:
    names: list[str] = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            names.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of this list
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in names if name in ("fs-read", "fs-touch", str(_segment(watched)))]


def test_bytes_are_on_their_way_before_the_walk_and_come_only_once(watched: Watched) -> None:
    begun: list[bool] = []
    state = {"model": _model(0.0), "step": 0}
    with fs.Checkpointer(watched) as checkpointer, _during_the_walk(lambda: begun.append(watched.ahead == [True])):
        report = checkpointer.load(state)
    assert _same(_model(), state["model"])  # type: ignore[arg-type]
    assert state["step"] == 7
    assert begun == [True], "the state was walked first"
    assert watched.ahead == [True]
    assert report.bytes == COUNT * ELEMENTS * 4
    assert watched.readings[0].receipt().requested_bytes <= 1.02 * report.bytes
    assert not _left_over(watched)


def test_a_state_in_another_order_takes_what_was_read_ahead(watched: Watched) -> None:
    fresh = _model(0.0)
    state = {"step": 0, "model": {name: fresh[name] for name in reversed(fresh)}}
    with fs.Checkpointer(watched) as checkpointer:
        checkpointer.load(state)
    assert _same(_model(), fresh)
    assert watched.ahead == [True]


def test_verified_first_and_cast_and_strided_tensors_take_what_was_read_ahead(watched: Watched) -> None:
    fresh: dict[str, torch.Tensor] = _model(0.0)
    wide = torch.zeros(ELEMENTS, 3)
    fresh["5"] = wide[:, 1]
    state = {"model": fresh, "step": 0}
    with fs.Checkpointer(watched) as checkpointer:
        checkpointer.load(state, verify_first=True)
        assert _same(_model(), fresh)
        fresh["5"].zero_()
        checkpointer.load(state)
    assert _same(_model(), fresh)
    assert watched.ahead == [True, True]
    assert not wide[:, 0].any(), "bytes beside the tensor have changed"


@pytest.mark.parametrize("loads", ["some sections", "by rules", "large tensors", "few bytes"])
def test_what_does_not_seem_to_want_everything_reads_nothing_ahead(store: Path, loads: str) -> None:
    tensors = _model() if loads != "few bytes" else {"0": torch.ones(ELEMENTS)}
    if loads == "large tensors":
        tensors = {"0": torch.ones(6 << 20)}
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": tensors, "moments": tensors if loads == "few bytes" else _model(2.0)})
    watched = Watched(store)
    state: dict[str, object] = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    if loads in ("large tensors", "few bytes"):
        state["moments"] = {name: torch.zeros(ELEMENTS) for name in (tensors if loads == "few bytes" else _model())}
    if loads == "large tensors":
        with fs.Checkpointer(store) as checkpointer:
            checkpointer.save(2, {"model": {str(index): torch.ones(6 << 20) for index in range(2)}})
        state = {"model": {str(index): torch.zeros(6 << 20) for index in range(2)}}
    rules = [fs.Skip("moments.*")] if loads == "by rules" else []
    with fs.Checkpointer(watched) as checkpointer:
        checkpointer.load(state, rules=rules)
    assert watched.ahead == [False]
    watched.close()


def test_a_state_that_turns_out_to_want_a_part_gets_it_and_no_more_is_read_than_the_arena_holds(
    watched: Watched
) -> None:
    whole = _model()
    part = torch.zeros(100)
    state = {"model": _model(0.0) | {"3": fs.Shard(part, (ELEMENTS,), (50,))}, "step": 0}
    with fs.Checkpointer(watched) as checkpointer:
        checkpointer.load(state)
    loaded = {name: value for name, value in state["model"].items() if name != "3"}  # type: ignore[attr-defined]
    assert _same({name: whole[name] for name in loaded}, loaded)
    assert torch.equal(part, whole["3"][50:150])
    assert watched.ahead in ([True], [True, False])
    assert not _left_over(watched)


def test_damage_that_is_found_during_the_walk_leaves_memory_as_it_was(watched: Watched) -> None:
    flip(*place_of(watched.root / "step-00000001", "model.5"))

    def wait() -> None:
        assert watched.readings[0]._job is not None
        assert watched.readings[0]._job.wait(WAIT_S), "it ends by itself"

    state = {"model": _model(9.0), "step": 0}
    with fs.Checkpointer(watched) as checkpointer:
        with pytest.raises(fs.DamagedError, match="stored bytes do not match") as caught, _during_the_walk(wait):
            checkpointer.load(state)
        assert str(caught.value.facts["damaged"]).startswith("'model.5', chunk 0, bytes ")
        assert caught.value.written == ()
        assert _untouched(state["model"], 9.0)  # type: ignore[arg-type]
        assert not _left_over(watched)
        checkpointer.save(2, state)  # nothing was changed, so nothing forbids it


def test_small_files_are_read_before_the_tensors_bytes_and_once(watched: Watched) -> None:
    calls: list[tuple[str, str]] = []
    traced = TracingStore(watched, lambda call: calls.append((call.verb, call.path.rpartition("/")[2])))
    with fs.Checkpointer(traced) as checkpointer:
        checkpointer.load({"model": _model(0.0), "step": 0})
    reads = [call for call in calls if call[0] in ("read", "read_extents")]
    assert reads[-1][0] == "read_extents", "a small file waits behind large ones"
    names = [name for verb, name in reads if verb == "read"]
    assert names.count("objects.json") == names.count("rank-00000.safetensors") == 1


def test_a_checkpoint_that_was_fetched_is_checked_anew_the_next_time(watched: Watched) -> None:
    checkpoint = fs.open(watched.root)
    checkpoint.fetch()
    checkpoint.check()
    assert checkpoint.objects["step"] == 7
    flip(_segment(watched), 100)
    with pytest.raises(fs.DamagedError, match="the header of"):
        checkpoint.check()


def test_what_a_damaged_load_has_changed_counts_as_written(watched: Watched) -> None:
    """A graph that saved values, which are others now, is to notice."""
    flip(*place_of(watched.root / "step-00000001", "model.599"))
    fresh = _model(-1.0)
    before = {name: tensor._version for name, tensor in fresh.items()}
    with fs.Checkpointer(watched.root, engine=fs.EngineOptions(queue_depth=1, workers=1)) as checkpointer:
        with pytest.raises(fs.DamagedError):
            checkpointer.load({"model": fresh, "step": 0}, rules=[fs.Init("nothing")])
        changed = [name for name, tensor in fresh.items() if bool((tensor != -1.0).any())]
        assert changed, "the test proves nothing: no byte has changed"
        assert all(fresh[name]._version > before[name] for name in changed)
        whole = _model(-1.0)
        flip(*place_of(watched.root / "step-00000001", "model.599"))
        checkpointer.load({"model": whole, "step": 0})
        assert {tensor._version for tensor in whole.values()} == {1}, "each load counts once"


def test_damage_anywhere_names_every_tensor_that_has_changed(watched: Watched) -> None:
    flip(*place_of(watched.root / "step-00000001", "model.599"))
    fresh = _model(-1.0)
    with fs.Checkpointer(watched) as checkpointer, pytest.raises(fs.DamagedError) as caught:
        checkpointer.load({"model": fresh, "step": 0})
    assert str(caught.value.facts["damaged"]).startswith("'model.599', ")
    changed = {f"model.{name}" for name, tensor in fresh.items() if bool((tensor != -1.0).any())}
    assert changed <= set(caught.value.written)
    assert "model.599" not in changed


@pytest.mark.parametrize("wrong", ["shape", "missing", "unexpected"])
def test_a_state_that_is_refused_after_the_reading_began_is_as_it_was(watched: Watched, wrong: str) -> None:
    fresh = _model(9.0)
    if wrong == "shape":
        fresh["400"] = torch.full((7,), 9.0)
    elif wrong == "missing":
        fresh["more"] = torch.full((7,), 9.0)
    else:
        del fresh["400"]
    arrived: list[bool] = []

    def wait() -> None:
        _all_arrived(watched.readings[0])
        arrived.append(True)

    state = {"model": fresh, "step": 0}
    with fs.Checkpointer(watched) as checkpointer:
        with pytest.raises(fs.MismatchError, match="nothing was changed"), _during_the_walk(wait):
            checkpointer.load(state)
        assert arrived
        assert watched.ahead == [True]
        assert _untouched(fresh, 9.0)
        assert not _left_over(watched)
        checkpointer.save(2, state)


def _all_arrived(reading: ReadHandle) -> None:
    """Return once what is read ahead waits in the arena."""
    assert isinstance(reading, LocalReadHandle)
    assert reading._job is not None
    while reading._job.requested_bytes < COUNT * ELEMENTS * 4:
        assert not reading._job.wait(0.01)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_a_walk_that_is_interrupted_leaves_nothing_behind(watched: Watched, error: type[BaseException]) -> None:
    def happens() -> None:
        _all_arrived(watched.readings[0])
        raise error

    fresh = _model(9.0)
    with fs.Checkpointer(watched) as checkpointer:
        with pytest.raises(error), _during_the_walk(happens):
            checkpointer.load({"model": fresh, "step": 0})
        gc.collect()
        assert watched.ahead == [True]
        assert _untouched(fresh, 9.0)
        assert not _left_over(watched)
        checkpointer.load({"model": fresh, "step": 0})
    assert _same(_model(), fresh)


@pytest.mark.parametrize("happens", ["removed", "cut", "header"])
def test_a_segment_that_is_not_whole_is_named_as_ever(watched: Watched, happens: str) -> None:
    segment = _segment(watched)
    if happens == "removed":
        segment.unlink()
    elif happens == "cut":
        os.truncate(segment, segment.stat().st_size // 2)
    else:
        flip(segment, 100)
    messages = {"removed": "is missing", "cut": "is too short", "header": "the header of"}[happens]
    fresh = _model(9.0)
    with fs.Checkpointer(watched) as checkpointer:
        with pytest.raises(fs.DamagedError, match=messages):
            checkpointer.load({"model": fresh, "step": 0})
        assert _untouched(fresh, 9.0)
        assert not _left_over(watched)


def test_a_file_that_shrinks_while_it_is_read_ahead_is_damage_with_its_range(watched: Watched) -> None:
    half = _segment(watched).stat().st_size // 2
    fresh = _model(9.0)
    state = {"model": fresh, "step": 0}
    begin = watched.read_extents

    def cut(*arguments: object, **more: object) -> LocalReadHandle:
        os.truncate(_segment(watched), half)
        return begin(*arguments, **more)

    watched.read_extents = cut  # type: ignore[method-assign]
    with fs.Checkpointer(watched) as checkpointer, pytest.raises(fs.DamagedError) as caught:
        checkpointer.load(state)
    assert str(_segment(watched)) in str(caught.value)
    assert not _left_over(watched)


def test_a_store_in_memory_and_a_wrapped_one_read_ahead_too(tmp_path: Path) -> None:
    verbs: list[str] = []
    for opened in (MemoryStore(), TracingStore(LocalStore(tmp_path / "run"), lambda call: verbs.append(call.verb))):
        fresh = _model(0.0)
        with fs.Checkpointer(opened) as checkpointer:
            checkpointer.save(1, {"model": _model()})
            checkpointer.wait()
            checkpointer.load({"model": fresh})
        assert _same(_model(), fresh)
        opened.close()
    assert verbs.count("read_extents") == verbs.count("read_through") == 1


def test_a_manifest_that_claims_more_than_the_index_has_is_not_believed(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"step": 7})

    def claim(manifest: dict[str, object]) -> None:
        manifest["pieces"], manifest["data_bytes"] = 1 << 40, 1 << 50

    edit_manifest(store / "step-00000001", claim)
    state = {"step": 0}
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.load(state)
    assert state["step"] == 7


def test_several_threads_may_load_at_once(watched: Watched) -> None:
    def load() -> bool:
        fresh = _model(0.0)
        with fs.Checkpointer(watched.root) as checkpointer:
            checkpointer.load({"model": fresh, "step": 0})
        return _same(_model(), fresh)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda _: load(), range(4)))
