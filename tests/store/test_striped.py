"""Checkpoints over several paths: the places of segments, a path that fails, and a path that is missing."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flowstone as fs
from flowstone.config import MIB, EngineOptions
from flowstone.errors import ArgumentError, DamagedError, FlowstoneError, NotAStoreError, StorageError, is_damage
from flowstone.format.manifest import PATHS
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.memory import MemoryStore
from flowstone.store.objects.client import RetryPolicy
from flowstone.store.objects.store import ObjectStore
from flowstone.store.striped.path import StripedPath, weights
from flowstone.store.striped.store import StripedStore
from flowstone.store.wrap import FaultInjectingStore
from object_server import Server

ENGINE = EngineOptions(queue_depth=4, request_bytes=2 * MIB, workers=1)


def state(step: int, tensors: int = 8) -> dict[str, Any]:
    chance = np.random.default_rng(step)
    return {
        "weights": {str(i): torch.from_numpy(chance.integers(0, 256, MIB + i, np.uint8)) for i in range(tensors)},
        "small": torch.arange(100), "step": step,
    }


def loads(store: Store | Path | str, step: int | None = None) -> int:
    """The step that is loaded, which has to be what was saved."""
    blank = {"weights": {key: torch.zeros_like(weight) for key, weight in state(0)["weights"].items()},
             "small": torch.zeros(100, dtype=torch.int64), "step": 0}
    with fs.Checkpointer(store, engine=ENGINE) as checkpointer:
        loaded = checkpointer.load(blank, step=step).step
    expected = state(loaded)
    assert blank["step"] == loaded
    assert all(torch.equal(blank["weights"][weight], expected["weights"][weight]) for weight in expected["weights"])
    return loaded


class Two:
    """Two directories; the second one fails by `before`, if that is given."""

    def __init__(self, root: Path) -> None:
        self.first, self.second = root / "one" / "gpt", root / "two" / "gpt"
        self.time = 0.0

    def store(self, before: Callable[[str, str], FlowstoneError | None] = lambda verb, path: None) -> StripedStore:
        second = FaultInjectingStore(LocalStore(self.second, ENGINE), before)
        return StripedStore([LocalStore(self.first, ENGINE), second], now=lambda: self.time)

    def segments(self, step: int) -> tuple[list[str], list[str]]:
        """Names of a step's segments on each path."""
        there = list(self.second.glob(f"segments-{step:08d}-*"))
        return (
            sorted(path.name for path in (self.first / f"step-{step:08d}").glob("*rank-*")),
            sorted(path.name for directory in there for path in directory.iterdir()),
        )


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def saved(store: Store, *steps: int, **options: Any) -> None:
    with fs.Checkpointer(store, engine=ENGINE, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step)).committed.result()


def refusal(code: int) -> StorageError:
    return StorageError("the disk refuses", errno=code, next="replace it")


def test_a_save_is_spread_over_both_paths_and_comes_back(two: Two) -> None:
    saved(two.store(), 1)
    assert two.segments(1) == (["rank-00000.safetensors"], ["rank-00000.0001-path1.safetensors"])
    sizes = [sum(path.stat().st_size for path in root.rglob("*rank-*")) for root in (two.first, two.second)]
    assert max(sizes) < 1.3 * min(sizes)
    assert loads(two.store()) == loads(two.first) == 1
    checkpoint = fs.open(two.first)
    assert PATHS in checkpoint.manifest.critical
    assert checkpoint.verify().sound
    assert fs.open(two.first / "step-00000001").read("small").tolist() == list(range(100))


def test_a_store_with_one_path_is_a_plain_one(two: Two) -> None:
    saved(StripedStore([LocalStore(two.first, ENGINE)]), 1)
    assert fs.open(two.first).manifest.critical == ()
    assert not (two.first / "path-1.json").exists()
    assert loads(LocalStore(two.first)) == 1


def test_what_is_removed_goes_from_both(two: Two) -> None:
    saved(two.store(), 1, 2, 3, keep=fs.Keep(last=2))
    assert {path.name.split("-")[1] for path in two.second.glob("segments-*")} == {"00000002", "00000003"}
    with fs.Checkpointer(two.store(), engine=ENGINE) as checkpointer:
        checkpointer.rewind(2)
        checkpointer.save(3, state(3)).committed.result()
    assert len(list(two.second.glob("segments-00000003-*"))) == 2  # one was set aside with its checkpoint
    assert loads(two.first) == 3
    assert [path for path in two.first.iterdir() if path.name.startswith(".saving")] == []


def test_what_did_not_change_is_linked_on_its_path(two: Two) -> None:
    still = {"weights": {str(index): torch.full((MIB,), float(index)) for index in range(6)}, "step": torch.zeros(1)}
    with fs.Checkpointer(two.store(), engine=ENGINE) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, still).committed.result()
    first, second = two.segments(3)
    assert [name[:5] for name in (first[0], second[0])] == ["from-", "from-"]
    assert next(two.second.glob(f"*-00000003-*/{second[0]}")).stat().st_nlink == 2
    blank = {"weights": {weight: torch.zeros(MIB) for weight in still["weights"]}, "step": torch.ones(1)}
    with fs.Checkpointer(two.first, engine=ENGINE) as checkpointer:
        checkpointer.load(blank)
    assert all(torch.equal(blank["weights"][weight], still["weights"][weight]) for weight in still["weights"])
    assert fs.open(two.first).verify().sound


@pytest.mark.parametrize("compress", ["max", "derived"])
def test_codecs_work_over_both(two: Two, compress: Any) -> None:
    engine = EngineOptions(queue_depth=4, request_bytes=2 * MIB, workers=1, compress=compress, kept_bytes=64 * MIB)
    master = {str(index): torch.randn(400_000) for index in range(6)}
    store = StripedStore([LocalStore(two.first, engine), LocalStore(two.second, engine)])
    with fs.Checkpointer(store, engine=engine) as checkpointer:
        for step in (1, 2, 3):
            for tensor in master.values():
                tensor += 1e-6
            held = {"master": master, "half": {key: tensor.bfloat16() for key, tensor in master.items()}}
            checkpointer.save(step, held).committed.result()
    blank = {"master": {position: torch.zeros(400_000) for position in master},
             "half": {position: torch.zeros(400_000, dtype=torch.bfloat16) for position in master}}
    with fs.Checkpointer(two.first) as checkpointer:
        checkpointer.load(blank)
    assert all(torch.equal(blank["master"][index], master[index]) for index in master)
    assert all(torch.equal(blank["half"][index], master[index].bfloat16()) for index in master)
    assert fs.open(two.first).verify().sound


@pytest.mark.parametrize(("verb", "code"), [
    ("write", errno.EROFS), ("make_directory", errno.EROFS), ("reserve", errno.ENOSPC), ("end", errno.EIO),
])
def test_what_a_path_refuses_is_on_the_first_one_within_that_save(
    two: Two, verb: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {"now": True}

    def before(result: str, path: str) -> FlowstoneError | None:
        return refusal(code) if result == verb and broken["now"] and "segments-" in path else None

    def before_any(found: str, path: str) -> FlowstoneError | None:  # some verbs are told of no path
        return refusal(code) if found == verb and broken["now"] and verb in ("reserve", "end") else before(found, path)

    store = two.store(before_any)
    with fs.Checkpointer(store, engine=ENGINE) as checkpointer, caplog.at_level(logging.WARNING):
        checkpointer.save(1, state(1)).committed.result()
        assert two.segments(1) == (["rank-00000.0001-path1.safetensors", "rank-00000.safetensors"], [])
        assert "path 1" in caplog.text
        assert "other paths get its bytes" in caplog.text
        checkpointer.save(2, state(2)).committed.result()
        assert two.segments(2) == (["rank-00000.safetensors"], [])  # it is left out
        broken["now"] = False
        two.time = 10.0  # longer than the first pause
        checkpointer.save(3, state(3)).committed.result()
        assert two.segments(3)[1] == ["rank-00000.0001-path1.safetensors"]
        assert "works again" in caplog.text
    for step in (1, 2, 3):
        assert loads(two.first, step) == step
        assert fs.open(two.first, step).verify().sound


def test_a_path_that_comes_back_too_early_is_left_out_for_longer(two: Two) -> None:
    path = StripedPath(1, LocalStore(two.second), None, lambda: two.time)
    pauses = []
    for _ in range(12):
        path.mark_failed(refusal(errno.EIO))
        begin = two.time
        while not path.is_usable:
            two.time += 0.5
        pauses.append(two.time - begin)
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-1] == 300
    path.mark_working()
    assert path.is_usable


def test_weights_follow_rates_slowly_and_stay_where_little_changes(two: Two) -> None:
    paths = [StripedPath(number, LocalStore(two.first), None, lambda: 0.0) for number in range(2)]
    assert weights(paths, {}) == {0: 0.5, 1: 0.5}
    paths[0].add_measurement(300 * MIB, 1.0)
    paths[1].add_measurement(100 * MIB, 1.0)
    actual = weights(paths, {0: 0.5, 1: 0.5})
    assert actual == {0: 0.75, 1: 0.25}
    paths[1].add_measurement(MIB, 1.0)  # too little to say anything
    paths[1].add_measurement(110 * MIB, 1.0)
    assert weights(paths, actual) is actual
    paths[1].add_measurement(300 * MIB, 1.0)
    later = weights(paths, actual)
    assert 0.25 < later[1] < 0.45
    assert weights([paths[0], StripedPath(1, LocalStore(two.second), 3.0, lambda: 0.0)], {}) == {0: 0.25, 1: 0.75}
    slow = [paths[0], StripedPath(1, LocalStore(two.second), None, lambda: 0.0)]
    slow[1].add_measurement(64 * MIB, 1000.0)
    assert weights(slow, {})[1] == pytest.approx(1 / 64)


def test_a_path_with_weight_0_gets_nothing_more_and_is_read(two: Two) -> None:
    saved(two.store(), 1)
    store = fs.Striped([two.first, two.second], weights=[1, 0], engine=ENGINE)
    saved(store, 2)
    assert two.segments(2) == (["rank-00000.safetensors"], [])
    assert loads(two.first, 1) == 1


@pytest.mark.parametrize("left", ["nothing", "a mount point", "another store's path"])
def test_a_path_that_is_not_there_is_no_damage_and_no_step_is_passed_over(two: Two, tmp_path: Path, left: str) -> None:
    with fs.Checkpointer(LocalStore(two.first, ENGINE)) as checkpointer:
        checkpointer.save(1, state(1))  # on the first path alone
    saved(two.store(), 2)
    away = two.second.with_name("away")
    two.second.rename(away)
    if left == "a mount point":
        two.second.mkdir()
    elif left != "nothing":
        other = Two(tmp_path / "other")
        saved(other.store(), 1)
        shutil.copytree(other.second, two.second)
    blank = {**state(0), "weights": {key: torch.zeros_like(weight) for key, weight in state(0)["weights"].items()}}
    for store in (two.first, fs.Striped([two.first, two.second]))[: 1 if left.startswith("another") else 2]:
        with fs.Checkpointer(store, engine=ENGINE) as checkpointer:
            newest = checkpointer.latest()
            assert newest is not None
            assert newest.step == 2
            for fallback in (False, True):
                missing = f"{two.second}, path 1 of the striped store {two.first}, is missing"
                with pytest.raises(StorageError, match=missing) as caught:
                    checkpointer.load(blank, fallback=fallback)
                assert not is_damage(caught.value)
                assert "rank-00000.0001-path1.safetensors" in str(caught.value)
                assert "fs.Striped" in str(caught.value)
            assert not any(weight.any() for weight in blank["weights"].values())
    for ask in (fs.open(two.first).inspect, fs.open(two.first).verify):
        with pytest.raises(StorageError, match="is missing"):
            ask()
    assert fs.open(two.first).objects["step"] == 2
    assert loads(fs.Striped([two.first, away], engine=ENGINE)) == 2  # it says which one it is
    shutil.rmtree(two.second, ignore_errors=True)
    away.rename(two.second)
    assert loads(two.first) == 2


def test_segments_that_are_gone_from_a_path_that_is_there_are_damage(two: Two) -> None:
    for step in (1, 2):
        saved(two.store(), step)
    shutil.rmtree(next(two.second.glob("segments-00000002-*")))
    inspected = fs.open(two.first).inspect()
    assert [(f.file, f.what) for f in inspected.findings] == [("rank-00000.0001-path1.safetensors", "is missing")]
    blank = {**state(0), "weights": {key: torch.zeros_like(weight) for key, weight in state(0)["weights"].items()}}
    with fs.Checkpointer(two.first, engine=ENGINE) as checkpointer:
        with pytest.raises(DamagedError):
            checkpointer.load(blank)
        assert checkpointer.load(blank, fallback=True).step == 1


def test_a_tier_whose_path_is_not_there_gives_way_to_the_next(two: Two, tmp_path: Path) -> None:
    with fs.Checkpointer([fs.Striped([two.first, two.second], engine=ENGINE), tmp_path / "far"]) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).committed.result()
        checkpointer.wait()
        checkpointer.drain()
    two.second.rename(two.second.with_name("away"))
    blank = {**state(0), "weights": {key: torch.zeros_like(weight) for key, weight in state(0)["weights"].items()}}
    with fs.Checkpointer([fs.Striped([two.first, two.second], engine=ENGINE), tmp_path / "far"]) as checkpointer:
        report = checkpointer.load(blank)
    assert (report.step, report.tier) == (2, str(tmp_path / "far"))
    assert "is missing" in report.why


def test_a_directory_that_was_mounted_and_is_empty_now_gets_nothing(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    saved(two.store(), 1)
    two.second.rename(two.second.with_name("away"))
    two.second.mkdir()
    with caplog.at_level(logging.WARNING):
        saved(two.store(), 2)
    assert "mount the file system that was at this path" in caplog.text
    assert list(two.second.iterdir()) == []
    assert loads(two.first, 2) == 2


def test_a_first_path_that_is_not_mounted_is_no_first_start(two: Two) -> None:
    saved(two.store(), 1)
    away = two.first.rename(two.first.with_name("away"))
    two.first.mkdir()
    with fs.Checkpointer(fs.Striped([two.first, two.second])) as checkpointer:
        for ask in (
            checkpointer.latest, lambda: checkpointer.load(state(0)), lambda: checkpointer.save(2, state(2)),
            checkpointer.latest,
        ):
            with pytest.raises(StorageError, match=f"{two.first}, the first path, contains no store"):
                ask()
    assert [path.name for path in two.first.iterdir()] == ["flowstone.lock"], "of the save"
    shutil.rmtree(two.first)
    away.rename(two.first)
    assert loads(two.first, 1) == 1


def test_copies_of_one_path_alone_say_what_is_missing(two: Two, tmp_path: Path) -> None:
    saved(two.store(), 1)
    copy = tmp_path / "step-00000001"
    shutil.copytree(two.first / "step-00000001", copy)
    checkpoint = fs.open(copy)
    with pytest.raises(FlowstoneError) as caught:
        [checkpoint.read(f"weights.{index}") for index in range(8)]
    assert "-path1" in str(caught.value)
    assert "flowstone pack" in str(caught.value)
    with pytest.raises(NotAStoreError, match="has only some files of a striped store"):
        fs.open(two.second)
    for segment in two.second.rglob("*-path1*"):
        shutil.copy(segment, copy)
    assert fs.open(copy).verify().sound


def test_pack_makes_it_whole(two: Two, tmp_path: Path) -> None:
    saved(two.store(), 1)
    fs.pack(two.first, tmp_path / "packed")
    shutil.rmtree(two.second)
    assert fs.open(tmp_path / "packed").manifest.critical == ()
    tensor = fs.open(tmp_path / "packed").read("weights.3")
    assert torch.equal(tensor, state(1)["weights"]["3"])


def test_a_commit_whose_last_sync_fails_keeps_its_segments(two: Two) -> None:
    """The draft is the checkpoint by then: to give it up must not take what lies on other paths."""
    saved(two.store(), 1)

    def before(verb: str, path: str) -> FlowstoneError | None:
        is_renamed = any(two.first.glob("step-00000002"))
        return refusal(errno.EIO) if verb == "sync_directory" and not path and is_renamed else None

    store = StripedStore([FaultInjectingStore(LocalStore(two.first, ENGINE), before), LocalStore(two.second, ENGINE)])
    checkpointer = fs.Checkpointer(store, engine=ENGINE, on_error="continue")
    with pytest.raises(StorageError):
        checkpointer.save(2, state(2)).committed.result()
    checkpointer.close()
    assert loads(two.first) == 2
    assert fs.open(two.first).verify().sound


def test_segments_of_a_draft_that_a_power_loss_took_are_swept(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    saved(two.store(), 1, 2)
    lost, moved = two.second / "segments-00000003-aa-1", two.second / "segments-00000001-bb-1"
    for directory in (lost, moved):
        directory.mkdir()
        (directory / "rank-00000.0001-path1.safetensors").write_bytes(b"torn")
    with caplog.at_level(logging.WARNING):
        saved(two.store(), 4)
    assert not lost.exists()
    assert moved.exists()  # perhaps somebody has moved that step away by hand
    assert moved.name in caplog.text
    assert loads(two.first, 2) == 2


def test_a_third_path_is_noted_and_the_first_two_stay(two: Two, tmp_path: Path) -> None:
    saved(two.store(), 1)
    third = tmp_path / "three" / "gpt"
    saved(fs.Striped([two.first, third], engine=ENGINE), 2)
    assert list(third.rglob("*-path2.safetensors"))
    assert two.segments(2)[1] == []
    assert loads(two.first, 1) == 1
    assert loads(two.first, 2) == 2
    saved(fs.Striped([two.first, third, two.second], engine=ENGINE), 3)
    assert two.segments(3)[1]
    assert loads(two.first, 3) == 3


@pytest.mark.parametrize(("verb", "code"), [("write", errno.EROFS), ("reserve", errno.ENOSPC), ("end", errno.EIO)])
def test_of_three_paths_what_one_refuses_is_on_another_by_their_weights(
    two: Two, tmp_path: Path, verb: str, code: int
) -> None:
    broken = {"now": True}

    def before(result: str, path: str) -> FlowstoneError | None:
        return refusal(code) if result == verb and broken["now"] and (verb != "write" or "rank" in path) else None

    third = tmp_path / "three" / "gpt"
    paths = [
        LocalStore(two.first, ENGINE), FaultInjectingStore(LocalStore(two.second, ENGINE), before),
        LocalStore(third, ENGINE)
    ]
    store = StripedStore(paths, [0.0, 1.0, 1.0], now=lambda: two.time)
    with fs.Checkpointer(store, engine=ENGINE, keep=1) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        assert two.segments(1) == ([], [])
        assert sorted(path.name[-17:] for path in third.glob("segments-00000001-*/*")) == [
            "path1.safetensors", "path2.safetensors"
        ]
        assert loads(two.first, 1) == 1
        assert fs.open(two.first, 1).verify().sound
        broken["now"], two.time = False, 10.0
        checkpointer.save(2, state(2)).committed.result()
        assert two.segments(2)[1]
        checkpointer._saves.sole_writer.drain()
        assert not list(third.glob("segments-00000001-*"))
    assert loads(two.first, 2) == 2


def test_a_path_that_was_noted_on_its_own_side_alone_keeps_its_number_and_a_new_one_gets_another(
    two: Two, tmp_path: Path
) -> None:
    """Found by simulation: after a job that was killed in between, the new path was taken for the same one."""
    third = tmp_path / "three" / "gpt"
    saved(fs.Striped([two.first, two.second], engine=ENGINE), 1)
    (two.first / "path-1.json").unlink()
    saved(fs.Striped([two.first, two.second, third], engine=ENGINE), 2)
    assert two.segments(2)[1]
    assert list(third.rglob("*-path2.safetensors"))
    assert loads(two.first, 2) == 2


@pytest.mark.parametrize(("paths", "weight", "kind"), [
    (["a", "a"], None, "twice"), ([], None, "list"), ("a", None, "list"), (["a", "b"], [1], "1 weights for 2"),
    (["a", "b"], [0, 0], "not all 0"), (["a", "b"], [-1, 1], "must be finite"),
    ([MemoryStore(), "b"], None, "a path of a striped"),
])
def test_lists_that_cannot_be(tmp_path: Path, paths: Any, weight: Any, kind: str) -> None:
    given = [path if isinstance(path, MemoryStore) else tmp_path / path for path in paths] if paths != "a" else paths
    with pytest.raises(ArgumentError, match=kind):
        fs.Striped(given, weights=weight)


def test_one_directory_by_two_names_is_given_twice(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for name in ("b/../a", "link"):
        with pytest.raises(ArgumentError, match="was given twice"):
            fs.Striped([tmp_path / "a", tmp_path / name])


def test_a_bucket_cannot_be_first(url: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot rename directories"):
        fs.Striped([url, tmp_path])


def test_another_stores_path_is_refused(two: Two, tmp_path: Path) -> None:
    saved(two.store(), 1)
    with pytest.raises(ArgumentError, match="another striped store"):
        saved(fs.Striped([tmp_path / "new", two.second], engine=ENGINE), 1)
    saved(LocalStore(tmp_path / "plain"), 1)
    with pytest.raises(ArgumentError, match="is a store of its own"):
        saved(fs.Striped([two.first, tmp_path / "plain"], engine=ENGINE), 2)


def test_a_directory_and_a_bucket(two: Two, url: str) -> None:
    store = fs.Striped([two.first, url], engine=ENGINE)
    saved(store, 1, 2, 3, keep=fs.Keep(last=2))
    bucket = ObjectStore(url)
    assert [name[:17] for name in bucket.names()] == ["path.json", "segments-00000002", "segments-00000003"]
    bucket.close()
    assert loads(two.first) == 3
    assert fs.open(two.first).verify().sound


def test_a_bucket_that_is_down_gets_nothing(
    two: Two, url: str, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail(share=1, kinds=("slow down",))
    bucket = ObjectStore(url, patience=RetryPolicy(budget_s=0.2, request_s=5, first_delay_s=0.01, delay_s_max=0.05))
    with caplog.at_level(logging.WARNING):
        saved(StripedStore([LocalStore(two.first, ENGINE), bucket], now=lambda: two.time), 1)
    server.fail(share=0)
    assert f"({url}) of a striped store failed" in caplog.text
    assert loads(LocalStore(two.first)) == 1
