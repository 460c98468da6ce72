"""A bucket that is one path of several, and fails during an upload: its bytes go to the directories."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path

import pytest
import torch
from test_striped import refusal

import flowstone as fs
from flowstone.config import MIB, Compress, EngineOptions
from flowstone.errors import FlowstoneError, LockedError, StorageError
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.objects.client import RetryPolicy
from flowstone.store.objects.retry_buffer import Spool
from flowstone.store.objects.store import ObjectStore
from flowstone.store.striped.store import StripedStore
from flowstone.store.wrap import FaultInjectingStore
from object_server import Server

ENGINE = EngineOptions(queue_depth=4, request_bytes=2 * MIB, workers=1)
NAME = "rank-00000.0001-path1.safetensors"
SHORT = RetryPolicy(budget_s=0.3, request_s=5, first_delay_s=0.01, delay_s_max=0.05)


def state(step: int, tensors: int = 12, bytes_: int = 3 * MIB) -> dict[str, object]:
    chance = torch.Generator().manual_seed(step)
    return {
        "weights": {str(i): torch.randn(bytes_ // 4 + i, generator=chance) for i in range(tensors)}, "step": step,
    }


def assert_is_there(store: Path, step: int, **shape: int) -> None:
    into, expected = state(0, **shape), state(step, **shape)
    with fs.Checkpointer(store, engine=ENGINE) as checkpointer:
        checkpointer.load(into, step=step)
    weights, arrays = into["weights"], expected["weights"]
    assert isinstance(weights, dict)
    assert isinstance(arrays, dict)
    assert all(torch.equal(weights[name], arrays[name]) for name in arrays)
    assert fs.open(store, step).verify().sound


def has_moved(directory: Path, step: int) -> bool:
    return bool(list((directory / f"step-{step:08d}").glob("rank-*-path1*")))


def open_files() -> list[str]:
    return sorted(str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


@pytest.mark.parametrize(("only", "budget_bytes", "compress"), [
    ("part", 24 * MIB, "off"), ("end", 24 * MIB, "max"), ("part", 512 * MIB, "max"), ("end", 512 * MIB, "off"),
], ids=["part-copied", "end-copied-encoded", "part-held-encoded", "end-held"])
def test_what_a_bucket_refuses_under_way_goes_to_the_directory(
    tmp_path: Path, url: str, server: Server, only: str, budget_bytes: int, compress: Compress,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`end`: all parts are there, and the object does not become complete. `copied`: most of it is in no block by then.
    """
    first = tmp_path / "one"
    engine = EngineOptions(queue_depth=4, request_bytes=2 * MIB, workers=1, compress=compress)
    store = StripedStore([LocalStore(first, engine), ObjectStore(url, engine, patience=SHORT)], now=time.monotonic)
    with fs.Checkpointer(store, engine=engine, budget_bytes=budget_bytes, keep=2) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        server.fail(share=1, kinds=("denied",), only=only)
        with caplog.at_level(logging.WARNING):
            checkpointer.save(2, state(2)).committed.result()
        assert server.failed()["denied"]
        server.fail(share=0)
        assert "cannot upload" in caplog.text
        assert f"path 1 ({url}) of a striped store failed" in caplog.text
        assert (has_moved(first, 1), has_moved(first, 2)) == (False, True)
        assert_is_there(first, 1)
        assert_is_there(first, 2)
        checkpointer.save(3, state(3)).committed.result()
        checkpointer.save(4, state(4)).committed.result()
    assert_is_there(first, 3)
    bucket = ObjectStore(url)
    kept = {name[:17] for name in bucket.names() if name.startswith("segments")}
    bucket.close()
    assert kept <= {"segments-00000003", "segments-00000004"}, "what kept the name of the segment went, too"
    assert not [file for file in open_files() if "flowstone-" in file and "deleted" in file]


def test_what_is_captured_while_training_goes_on_moves_too(tmp_path: Path, url: str, server: Server) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1100, 1100, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    first, tensor = tmp_path / "one", dict[int, dict[str, torch.Tensor]]()
    store = StripedStore([LocalStore(first, ENGINE), ObjectStore(url, patience=SHORT)], [1.0, 3.0], now=lambda: 0.0)
    server.fail(share=0.5, kinds=("slow down", "reset before", "denied"), only="part")
    with fs.Checkpointer(store, engine=ENGINE, budget_bytes=64 * MIB) as checkpointer:
        for step in range(1, 4):
            model(torch.ones(2, 1100)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tensor[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
    assert any(has_moved(first, step) for step in tensor)
    server.fail(share=0)
    for step, expected in tensor.items():
        with fs.Checkpointer(first) as checkpointer:
            checkpointer.load({"model": model}, step=step)
        assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())


def test_of_two_directories_the_one_with_weight_gets_it(tmp_path: Path, url: str, server: Server) -> None:
    first, third = tmp_path / "one", tmp_path / "three"
    stores: list[Store] = [LocalStore(first, ENGINE), ObjectStore(url, patience=SHORT), LocalStore(third, ENGINE)]
    with fs.Checkpointer(StripedStore(stores, [0.0, 1.0, 1.0], now=lambda: 0.0), engine=ENGINE) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        server.fail(share=1, kinds=("denied",), only="end")
        checkpointer.save(2, state(2)).committed.result()
        server.fail(share=0)
    assert not has_moved(first, 2)
    (there,) = third.glob("segments-00000002-*")
    assert [p.name[-17:-12] for p in sorted(there.iterdir(), key=lambda p: p.name[-17:])] == ["path1", "path2"]
    assert_is_there(first, 2)


def test_one_that_is_small_is_one_request_and_moves(tmp_path: Path, url: str, server: Server) -> None:
    first, shape = tmp_path / "one", {"tensors": 4, "bytes_": MIB}
    store = StripedStore([LocalStore(first, ENGINE), ObjectStore(url, patience=SHORT)], now=lambda: 0.0)
    with fs.Checkpointer(store, engine=ENGINE) as checkpointer:
        checkpointer.save(1, state(1, **shape)).committed.result()
        server.requests()
        save = checkpointer.save(2, state(2, **shape))
        save.committed.result()
        (sent,) = [index for index, line in enumerate(server.requests()) if line.startswith("PUT") and NAME in line][1:]
        assert sent, "the claim of its name comes before"
        server.fail(share=1, kinds=("denied",), only="in place of a claim")
        checkpointer.save(3, state(3, **shape)).committed.result()
        server.fail(share=0)
    assert not has_moved(first, 2)
    assert has_moved(first, 3)
    assert_is_there(first, 3, **shape)


def test_without_room_elsewhere_the_save_fails_and_says_what_the_bucket_said(
    tmp_path: Path, url: str, server: Server
) -> None:
    first, shut = tmp_path / "one", list[bool]()

    def before(verb: str, path: str) -> FlowstoneError | None:
        return refusal(errno.ENOSPC) if shut and verb == "write" and path.endswith(NAME) else None

    store = StripedStore([FaultInjectingStore(LocalStore(first, ENGINE), before), ObjectStore(url, patience=SHORT)])
    with fs.Checkpointer(store, engine=ENGINE) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        server.fail(share=1, kinds=("denied",), only="part")
        shut.append(True)
        with pytest.raises(StorageError, match="cannot upload") as caught:
            checkpointer.save(2, state(2)).committed.result()
        assert caught.value.errno == errno.EACCES
        server.fail(share=0)
        shut.clear()
        checkpointer.save(3, state(3)).committed.result()
    assert [path.name for path in sorted(first.glob("step-*"))] == ["step-00000001", "step-00000003"]
    assert_is_there(first, 3)


@pytest.mark.parametrize("fails", [False, True])
def test_where_no_room_is_left_to_keep_it_the_upload_goes_on(
    tmp_path: Path, url: str, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *,
    fails: bool,
) -> None:
    """The first path's disk has room for its own segments, and none for the temporary file."""
    first, written = tmp_path / "one", list[int]()
    write = Spool.write

    def refused(spool: Spool, offset: int, data: memoryview) -> None:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "no space")
        written.append(offset)
        write(spool, offset, data)

    monkeypatch.setattr(Spool, "write", refused)
    store = StripedStore([LocalStore(first, ENGINE), ObjectStore(url, patience=SHORT)], now=lambda: 0.0)
    with fs.Checkpointer(store, engine=ENGINE, budget_bytes=24 * MIB) as checkpointer:
        server.fail(share=float(fails), kinds=("denied",), only="end")
        if fails:
            with pytest.raises(StorageError, match="cannot upload"):
                checkpointer.save(1, state(1)).committed.result()
        else:
            checkpointer.save(1, state(1)).committed.result()
    assert len(written) == 3
    assert "if this upload fails, the save fails" in caplog.text
    if not fails:
        assert not has_moved(first, 1)
        assert_is_there(first, 1)


def test_what_another_job_has_taken_does_not_move(tmp_path: Path, url: str) -> None:
    first = tmp_path / "one"

    def before(verb: str, path: str) -> None:
        """Segments of the first path are made last: what keeps the other one's name is there already."""
        if verb == "write":
            other = ObjectStore(url)
            (segments,) = [name for name in other.names() if name.startswith("segments")]
            other.remove(f"{segments}/{NAME}")
            other.close()

    store = StripedStore([FaultInjectingStore(LocalStore(first, ENGINE), before), ObjectStore(url)])
    with (
        fs.Checkpointer(store, engine=ENGINE) as checkpointer,
        pytest.raises(LockedError, match="another job has removed or replaced this file"),
    ):
        checkpointer.save(1, state(1)).committed.result()
    assert not list(first.glob("step-*"))
