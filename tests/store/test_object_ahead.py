"""The objects that a load from a bucket requests with the manifest, before it has read that."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from obstore.store import MemoryStore

import flowstone as fs
from flowstone.commit.manifests import read_manifest
from flowstone.config import CHUNK_BYTES, KIB
from flowstone.load.prefetch_step import checkpoint_in, open_step
from flowstone.store.objects.store import ObjectStore
from flowstone.store.wrap import Wrapper
from object_server import Server

STEP = "step-00000002"
NAMES = ("index.safetensors", "objects.json", "rank-00000.safetensors")


def saved(url: str, steps: tuple[int, ...] = (1, 2), elements: int = 100_000) -> None:
    with fs.Checkpointer(url) as ckpt:
        for step in steps:
            ckpt.save(step, {"x": np.full(elements, float(step)), "epoch": step}).committed.result(60)


def loaded(url: str, elements: int = 100_000) -> float:
    """The value of the newest step, of which all elements are."""
    state: dict[str, object] = {"x": np.zeros(elements), "epoch": 0}
    with fs.Checkpointer(url) as ckpt:
        step = ckpt.load(state).step
    x = state["x"]
    assert isinstance(x, np.ndarray)
    assert (x == x[0]).all()
    assert state["epoch"] == step == x[0]
    return float(x[0])


def test_index_objects_and_header_are_asked_for_with_the_manifest(url: str, server: Server) -> None:
    saved(url, elements=2_500_000)
    server.requests()
    assert loaded(url, elements=2_500_000) == 2
    made = server.requests()
    first, second, third = made[:2], made[2:6], made[6:]
    assert any("flowstone.json" in item for item in first)
    assert any("list-type" in item for item in first)
    assert {name.split("?")[0].split(" ")[1].rpartition("/")[2] for name in second} == {"manifest.json", *NAMES}, made
    assert len(third) == 3, "the tensor"
    assert all(NAMES[2] in item for item in third)
    assert not any(name.startswith("HEAD") for name in made), "an answer with bytes tells the size, too"


def test_what_is_older_than_the_manifest_is_read_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(url, (1,))
    store = ObjectStore(url)
    for name in NAMES:
        store.put(f"{STEP}/{name}", b"of a writer that died" * 10_000)
    ahead = store.ahead()
    assert ahead is not None
    ahead.prefetch({f"{STEP}/{name}": CHUNK_BYTES for name in NAMES})
    ahead.close()
    assert ahead.read(f"{STEP}/{NAMES[0]}", length=9) == b"of a writ"
    for name in NAMES:
        store.remove(f"{STEP}/{name}")
    saved(url, (2,))
    assert ahead.size(f"{STEP}/{NAMES[2]}") == 210_000, "what it was then"
    assert checkpoint_in(ahead, read_manifest(store, STEP), fs.EngineOptions()) is None
    monkeypatch.setattr(ObjectStore, "ahead", lambda _: ahead)
    assert loaded(url) == 2


def test_damage_of_what_was_asked_for_ahead_is_found_and_named(url: str) -> None:
    saved(url)
    store = ObjectStore(url)
    for name in NAMES:
        content = bytearray(store.read(f"{STEP}/{name}"))
        content[9] ^= 1
        store.client.once.put(f"{STEP}/{name}", bytes(content))
        with pytest.raises(fs.DamagedError, match=name.replace(".", r"\.")):
            loaded(url)
        content[9] ^= 1
        store.client.once.put(f"{STEP}/{name}", bytes(content))
    store.remove(f"{STEP}/{NAMES[2]}")
    with pytest.raises(fs.DamagedError, match="missing"):
        loaded(url)


def test_a_step_that_is_not_committed_costs_its_first_requests_once(url: str, server: Server) -> None:
    saved(url)
    store = ObjectStore(url)
    for step in (3, 4):
        store.put(f"step-0000000{step}/rank-00000.safetensors", b"begun")
    server.requests()
    assert loaded(url) == 2
    made = [request for request in server.requests() if "/step-0000000" in request]
    assert sum("step-00000004" in arena for arena in made) == 4, made
    assert sum("step-00000003" in arena for arena in made) == 1, "the manifest that is not there"


def test_an_index_and_a_header_longer_than_what_is_asked_for_are_read_on(url: str) -> None:
    state: dict[str, object] = {f"tensor-{number}": np.full(3, number) for number in range(14_000)}
    with fs.Checkpointer(url) as ckpt:
        ckpt.save(1, state).committed.result(60)
        manifest = read_manifest(ckpt._store, "step-00000001")
        assert manifest.index.bytes > CHUNK_BYTES
        assert manifest.segments[0].header_bytes > 64 * KIB
        again: dict[str, object] = {name: np.zeros(3, int) for name in state}
        ckpt.load(again)
    assert all(np.array_equal(again[name], value) for name, value in state.items())  # type: ignore[arg-type]


def test_requests_that_fail_ahead_are_made_again(url: str, server: Server) -> None:
    saved(url)
    store = ObjectStore(url)
    ahead = store.ahead()
    assert ahead is not None
    server.fail(share=1, kinds=("500", "truncated"), method="GET")
    ahead.prefetch({f"{STEP}/{name}": 64 * KIB for name in NAMES})
    ahead.close()
    server.fail(share=0)
    assert ahead.size(f"{STEP}/{NAMES[0]}") == store.size(f"{STEP}/{NAMES[0]}")
    checkpoint = checkpoint_in(ahead, read_manifest(store, STEP), fs.EngineOptions())
    assert checkpoint is not None
    assert checkpoint.objects["epoch"] == 2


def test_nothing_is_asked_ahead_where_nothing_waits_or_something_would_be_passed_by() -> None:
    assert ObjectStore("fsspec+memory://ahead").ahead() is None
    inner = ObjectStore(MemoryStore())
    assert inner.ahead() is not None
    assert Wrapper(inner).ahead() is None
    with fs.Checkpointer(inner) as ckpt:
        ckpt.save(1, {"x": np.ones(5)}).committed.result(60)
        with ExitStack() as held:
            assert open_step(Wrapper(inner), None, held)[1] is None
            assert open_step(inner, None, None)[1] is None, "of several ranks each wants a part"
            assert open_step(inner, None, held)[1] is not None
