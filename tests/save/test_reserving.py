"""A later save does not wait until the file system has reserved its segment, but fails if that is refused."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import flowstone as fs
from flowstone.config import MIB, EngineOptions
from flowstone.save.pacing import Captures
from flowstone.store.base import Pace
from flowstone.store.local import LocalStore
from flowstone.store.local_io import LocalWriteHandle
from flowstone.store.system import System
from forge import content

PATIENCE_S = 60  # for a reservation that is never released: then the test fails instead of hanging


class Slow(System):
    """A file system that reserves when it is told to. Knows by which thread it was asked, and what was there before."""

    def __init__(self) -> None:
        self.may_reserve, self.is_asked = threading.Event(), threading.Event()
        self.may_reserve.set()
        self.threads: list[str] = []
        self.blocks: list[int] = []
        self.code = 0

    def reserve(self, fd: int, size_bytes: int) -> None:
        self.threads.append(threading.current_thread().name)
        self.is_asked.set()
        if not self.may_reserve.wait(PATIENCE_S):
            raise OSError(errno.ETIMEDOUT, "the reservation was never released")
        self.blocks.append(os.fstat(fd).st_blocks)
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        super().reserve(fd, size_bytes)


class Run:
    """A Checkpointer on such a file system that has saved one step: of `state`, late but for `early_mib`."""

    def __init__(self, path: Path, *, late_mib: int = 1, early_mib: int = 0) -> None:
        engine = EngineOptions(request_bytes=2 * MIB)
        self.disk = Slow()
        self.store = LocalStore(path / "run", engine, self.disk)
        self.checkpointer = fs.Checkpointer(self.store, engine=engine, budget_bytes=8 * MIB, on_error="continue")
        self.model = torch.nn.ParameterList(torch.randn(MIB // 4) for _ in range(late_mib))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": optimizer, "early": torch.randn(early_mib * MIB // 4)}
        self.save(1).committed.result()
        self.checkpointer.finish_saves(self.store.location)  # retention lists directories after the commit
        self.open_files = descriptors()

    def save(self, step: int) -> fs.Save:
        return self.checkpointer.save(step, self.state)

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model:
                parameter.add_(1)

    def loaded(self, step: int) -> list[torch.Tensor]:
        checkpoint = fs.open(self.store.root, step=step)
        return [checkpoint.read(f"model.{index}") for index in range(len(self.model))]

    @property
    def entries(self) -> list[str]:
        return sorted(name for name in self.store.names() if not name.startswith("flowstone."))


def is_waited_for(thread: str) -> bool:
    """Whether the caller of `save` waits for what this thread does: it is his, or the one where nothing interrupts."""
    return thread in (threading.current_thread().name, "flowstone-act")


def descriptors() -> int:
    """How many there are; what other tests have left to be collected gives its own back before that."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.disk.may_reserve.set()
    run.checkpointer.close()


def test_a_later_save_and_the_step_after_it_do_not_wait_for_the_reservation(run: Run) -> None:
    run.disk.may_reserve.clear()
    before = [parameter.detach().clone() for parameter in run.model]
    save = run.save(2)
    save.captured.result()
    run.change()
    assert run.disk.is_asked.wait(PATIENCE_S)
    assert not save.committed.done()
    run.disk.may_reserve.set()
    save.committed.result()
    assert is_waited_for(run.disk.threads[0]), "the first one plans, and is told of what is refused"
    assert not is_waited_for(run.disk.threads[1])
    assert run.disk.blocks == [0, 0], "nothing is written before all is reserved"
    assert content(run.loaded(2)) == content(before)


def test_a_save_that_waits_for_all_of_its_capture_reserves_where_it_is_called(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.state = {"early": torch.randn(MIB)}
    run.save(2)
    run.save(3)
    run.checkpointer.close()
    assert len(run.disk.threads) == 3
    assert all(map(is_waited_for, run.disk.threads))


def test_a_disk_that_is_full_already_is_told_by_save(run: Run) -> None:
    run.disk.code = errno.ENOSPC
    with mock.patch.object(run.store, "free_bytes", return_value=MIB), pytest.raises(fs.FullError, match="allocate"):
        run.save(2)
    assert is_waited_for(run.disk.threads[1])
    assert run.entries == ["step-00000001"]
    assert descriptors() == run.open_files


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_refuses_the_reservation_later_is_the_error_of_that_save(run: Run, code: int) -> None:
    run.disk.code = code
    save = run.save(2)
    save.captured.result()
    error = save.committed.exception()
    assert isinstance(error, fs.StorageError)
    assert isinstance(error, fs.FullError) == (code != errno.EIO)
    assert error.errno == code
    assert "allocate" in error.message
    assert f"{run.store.root}/.saving-00000002" in error.message
    if isinstance(error, fs.FullError):
        assert int(str(error.facts["needed"]).split()[0]) > MIB
    assert run.entries == ["step-00000001"]
    assert descriptors() == run.open_files
    run.disk.code = 0
    run.save(2).committed.result()
    assert content(run.loaded(2)) == content([parameter.detach() for parameter in run.model])


def test_what_is_captured_early_may_need_more_memory_than_there_is_before_anything_is_written(tmp_path: Path) -> None:
    """Then `save` waits for the device, and so for the reservation: but not for itself."""
    run = Run(tmp_path, early_mib=20)
    run.save(2).committed.result()
    assert not is_waited_for(run.disk.threads[1])
    run.checkpointer.close()


def test_a_reservation_does_not_wait_for_the_capture_of_the_save_before(tmp_path: Path) -> None:
    """Which may wait for memory that the second save holds until it is reserved."""
    with mock.patch.object(Captures, "pace", return_value=Pace(blocks=1, bytes_per_s=1)):
        run = Run(tmp_path, late_mib=20)
        saves = [run.save(2), run.save(3)]
        run.checkpointer.close()
    assert all(save.committed.result().step in (2, 3) for save in saves)


def test_a_save_is_finished_whatever_keeps_the_thread_that_reserves(run: Run) -> None:
    busy = threading.Event()
    run.checkpointer._saves._threads.reserver.submit(busy.wait)
    try:
        run.save(2).committed.result()
    finally:
        busy.set()
    assert run.disk.threads[1].startswith("flowstone-commit")
    assert len(run.disk.threads) == 2


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupted_save_leaves_nothing_while_its_segment_is_reserved(run: Run, has_begun: bool) -> None:
    busy = threading.Event()
    run.disk.is_asked.clear()
    run.disk.may_reserve.clear()
    if not has_begun:
        run.checkpointer._saves._threads.reserver.submit(busy.wait)

    def interrupt(_: LocalWriteHandle) -> None:
        assert not has_begun or run.disk.is_asked.wait(PATIENCE_S)
        threading.Timer(0.05, run.disk.may_reserve.set).start()
        raise KeyboardInterrupt

    try:
        with mock.patch.object(LocalWriteHandle, "wait_early", interrupt), pytest.raises(KeyboardInterrupt):
            run.save(2)
        assert run.entries == ["step-00000001"]
        assert descriptors() == run.open_files
        assert len(run.disk.threads) == 1 + has_begun
    finally:
        busy.set()
        run.disk.may_reserve.set()
    run.save(2).committed.result()
    assert run.entries == ["step-00000001", "step-00000002"]


def test_a_segment_that_refuses_direct_io_once_it_is_reserved_goes_through_the_page_cache(run: Run) -> None:
    with mock.patch("flowstone.store.engines._moves_block", return_value=False):
        save = run.save(2)
        assert save.committed.result().manifest.io.alignment == 1
    assert content(run.loaded(2)) == content([parameter.detach() for parameter in run.model])


def test_a_segment_is_reserved_by_the_caller_where_the_system_has_no_thread_for_it(run: Run) -> None:
    reserver = run.checkpointer._saves._threads.reserver
    with mock.patch.object(reserver, "submit", side_effect=RuntimeError("can't start new thread")):
        assert run.save(2).committed.result().step == 2
    assert is_waited_for(run.disk.threads[1])


def test_a_script_that_ends_while_its_last_save_is_reserved_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.disk.may_reserve.clear()
    save = run.save(2)
    threading.Timer(0.05, run.disk.may_reserve.set).start()
    run.checkpointer.close()
    assert save.committed.result().step == 2
