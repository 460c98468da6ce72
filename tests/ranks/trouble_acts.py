"""Functions for tests of failures: one rank fails at some point of a save or a load, or gets bad input."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from acts import opened, outcome

import flowstone as fs
from flowstone.commit import publish
from flowstone.coordination import rank_zero
from flowstone.coordination.rank_zero import RankZero
from flowstone.coordination.save_coordinator import SaveCoordinator
from flowstone.errors import StorageError
from flowstone.load import conductor as loading
from flowstone.ranks import agreement, exchange, failure_detector, kv_store
from flowstone.save import capturing
from flowstone.store.local import LocalStore
from flowstone.store.local_io import LocalWriteHandle
from flowstone.store.system import System

ROWS = 30_000
DEADLINE_S = 6.0  # half of it without a sign of life, and a rank is taken for dead
State = dict[str, object]

# Where a rank is struck: the call before which that happens, and text that one of its arguments has; None: it has none.
POINTS: dict[str, tuple[object, str, str | None]] = {
    "first": (SaveCoordinator, "assign", ""),  # of the very first save
    "save": (fs.Checkpointer, "save", ""),
    "plan": (SaveCoordinator, "assign", ""),
    "capture": (capturing, "start_capture", ""),
    "write": (LocalWriteHandle, "receipt", ""),
    "sync": (System, "sync", ""),
    "commit": (SaveCoordinator, "commit", ""),
    "index": (LocalStore, "put", "index"),
    "manifest": (LocalStore, "put", "manifest"),
    "rename": (LocalStore, "rename", ".saving"),
    "renamed": (LocalStore, "sync_directory", None),  # before the rename is durable
    "compare": (loading, "plan_load", ""),
    "read": (loading, "read", ""),
    "finish": (loading, "finish", ""),
}
DECIDING: dict[str, tuple[object, str, str | None]] = {
    "planned": (RankZero, "assign", None), "looked": (rank_zero, "differing_sections", None),
}
LOADS = ("compare", "read", "finish")
PUBLISHING = ("index", "manifest", "rename", "renamed")  # which rank 0 does alone


def state_of(rank: int, value: float, size: int = 3) -> State:
    """A part of a large tensor, replicas, a number."""
    rows = ROWS // size
    return {
        "wide": fs.Shard(torch.full((rows, 4), value), (rows * size, 4), (rows * rank, 0)),
        "model": {"bias": torch.full((100,), value), "large": torch.full((50_000,), value)}, "step": int(value),
    }


def tensors(state: State) -> list[torch.Tensor]:
    wide, model = state["wide"], state["model"]
    assert isinstance(wide, fs.Shard)
    assert isinstance(wide.tensor, torch.Tensor)
    assert isinstance(model, dict)
    return [wide.tensor, *model.values()]


def fill(state: State, value: float) -> None:
    for tensor in tensors(state):
        tensor.fill_(value)
    state["step"] = int(value)


def holds(state: State, value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in tensors(state))


@contextmanager
def struck(point: str, how: str) -> Iterator[None]:
    """At that point this process is killed, or stops until it is continued, or is refused something. Once.

    how  "killed", "frozen", "failing"; "spoilt": frozen, and then failing
    """
    owner, name, words = (POINTS | DECIDING)[point]
    original = getattr(owner, name)
    left = [1]

    def stand_in(*arguments: object, **more: object) -> object:
        texts = [argument for argument in arguments if isinstance(argument, str) and argument]
        if left and (not texts if words is None else not words or any(words in line for line in texts)):
            left.pop()
            if how != "failing":
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                time.sleep(0.5)  # another thread may have got it: this one does not outrun it
            if how in ("failing", "spoilt"):
                raise OSError(errno.EIO, "made up") if owner is System else StorageError("made up", errno=errno.EIO)
        return original(*arguments, **more)

    with mock.patch.object(owner, name, stand_in):
        yield


def attempt(checkpointer: fs.Checkpointer, point: str, state: State) -> BaseException | None:
    """Save step 2 or load step 1, whatever has such a point; what goes wrong."""
    if point not in LOADS:
        return outcome(checkpointer, 2, state)
    try:
        checkpointer.load(state)
    except fs.FlowstoneError as error:
        return error
    return None


def one_is_struck(rank: int, path: str, victim: int, point: str, how: str) -> dict[str, object]:
    """One rank is struck. What the others are told, and when; then, if all live, they go on together."""
    state = state_of(rank, 1)
    checkpointer = opened(path, on_error="continue", deadline_s=DEADLINE_S)
    if point != "first":
        checkpointer.save(1, state).committed.result(60)
    fill(state, 2)
    started = time.monotonic()
    with struck(point, how) if rank == victim else nullcontext():
        error = attempt(checkpointer, point, state)
    record = {
        "kind": type(error).__name__, "rank": getattr(error, "rank", None), "said": str(error),
        "undecided": getattr(error, "undecided", False), "waited_s": time.monotonic() - started,
        "untouched": holds(state, 2),
    }
    Path(f"{path}.told-{rank}").touch()
    if how == "killed":
        checkpointer._group._heartbeat.stop()  # type: ignore[union-attr]  # the others would wait for the rank that is gone
        return record
    while not Path(f"{path}.on").exists():
        time.sleep(0.01)
    proceed(checkpointer, state, point)
    return record


def proceed(checkpointer: fs.Checkpointer, state: State, point: str) -> None:
    """All ranks are there again: the next save succeeds, after a load where one has left the state half changed."""
    if point in LOADS:
        checkpointer.load(state)
        assert holds(state, 1)
    fill(state, 3)
    assert checkpointer.save(3, state).committed.result(60).step == 3
    fill(state, 0)
    assert checkpointer.load(state).step == 3
    assert holds(state, 3)
    checkpointer.close()


def rank_zero_ends_first(rank: int, path: str) -> int:
    """Rank 0 is gone, with what ranks talk over, before the others read that step 1 is committed."""
    read_outcome = exchange.Exchange.read_outcome

    def late(exchange: exchange.Exchange) -> exchange.AgreementOutcome:
        while rank and "the commit of" in exchange._phase and not Path(f"{path}.gone").exists():
            time.sleep(0.01)
        return read_outcome(exchange)

    checkpointer = opened(path, deadline_s=30.0)
    with mock.patch.object(exchange.Exchange, "read_outcome", late):
        step = checkpointer.save(1, state_of(rank, 1, size=2)).committed.result(60).step
        checkpointer.wait()
    checkpointer._group._heartbeat.stop()  # type: ignore[union-attr]
    return step


def the_same_step_again(rank: int, path: str, point: str, how: str) -> dict[str, object]:
    """Rank 0 stops while it decides, and the others give it up. As soon as it goes on, all save that step again."""
    state = {**state_of(rank, 1), "stages": {f"{rank}": torch.nn.Linear(2, 2)}}
    reported = []
    with opened(path, on_error="continue", deadline_s=DEADLINE_S) as checkpointer:
        checkpointer.save(1, state).committed.result(60)
        for value in (2, 3):
            fill(state, value)
            with struck(point, how) if (rank, value) == (0, 2) else nullcontext():
                error = outcome(checkpointer, 2, state)
            reported.append([getattr(error, "kind", type(error).__name__), getattr(error, "undecided", False)])
            Path(f"{path}.told-{rank}").touch()
            while not Path(f"{path}.on").exists():
                time.sleep(0.01)
        assert checkpointer.load(state).step == 2
        value = state["step"]
        assert isinstance(value, int)
        assert holds(state, value), "a mixture"
        left = [path.name for path in Path(path).glob(".saving-00000002-*")]
        fill(state, 4)
        checkpointer.save(3, state).committed.result(60)
    return {"told": reported, "value": value, "left": left}


def one_after_the_other(rank: int, path: str, victim: int, points: list[str]) -> list[list[object]]:
    """One rank fails at one point after the other, of the same job. What each is told."""
    seen = []
    state = state_of(rank, 0)
    with opened(path, on_error="continue", deadline_s=30.0) as checkpointer:
        for step, point in enumerate(points):
            fill(state, 2 * step + 1)
            checkpointer.save(2 * step + 1, state).committed.result(60)
            with struck(point, "failing") if rank == victim else nullcontext():
                if point in LOADS:
                    error = attempt(checkpointer, point, state)
                    checkpointer.load(state)
                    assert holds(state, 2 * step + 1)
                else:
                    error = outcome(checkpointer, 2 * step + 2, state)
            seen.append([type(error).__name__, getattr(error, "rank", None), getattr(error, "errno", None), str(error)])
    return seen


def begin_again(rank: int, paths: list[str]) -> list[int]:
    """A new job, after one that has lost a rank: load what is newest, save the next."""
    collected = []
    for path in paths:
        state = state_of(rank, 0)
        with opened(path) as checkpointer:
            newest = 0 if checkpointer.latest() is None else checkpointer.load(state).step
            assert holds(state, newest), f"{path} holds a mixture"
            fill(state, newest + 1)
            assert checkpointer.save(newest + 1, state).committed.result(60).step == newest + 1
        collected.append(newest)
    return collected


# Bad input


def _shard(length: int, shape: int, offset: int, dtype: torch.dtype = torch.float32) -> State:
    return {"x": {"w": fs.Shard(torch.ones(length, dtype=dtype), (shape,), (offset,))}}


BAD: dict[str, Callable[[int], State]] = {
    "overlap": lambda rank: _shard(5, 8, 3 * rank),
    "hole": lambda rank: _shard(3, 8, 5 * rank),
    "half": lambda rank: _shard(4, 8, 0),
    "shapes": lambda rank: _shard(4, 8 + rank, 4 * rank),
    "dtypes": lambda rank: _shard(4, 8, 4 * rank, torch.float16 if rank else torch.float32),
    "sections": lambda rank: {**_shard(4, 8, 4 * rank), **({"more": 1} if rank else {})},
}


def bad_states(rank: int, path: str) -> dict[str, str]:
    """States that no job can have, one after the other, and what each rank is told; then a good one."""
    states = {}
    with opened(path, on_error="continue") as checkpointer:
        for step, (name, make) in enumerate(BAD.items(), 1):
            error = outcome(checkpointer, step, make(rank))
            states[name] = f"{type(error).__name__}: {error}"
        checkpointer.save(99, _shard(4, 8, 4 * rank)).committed.result(60)
    return states


def does_not_fit(rank: int, path: str) -> dict[str, str]:
    """A checkpoint of other shapes, and of another job: what is told, and that nothing has changed."""
    record = {}
    with opened(path) as checkpointer:
        checkpointer.save(1, _shard(4, 8, 4 * rank)).committed.result(60)
        for name, state in {
            "more rows": _shard(6, 12, 6 * rank), "other names": {"x": {"v": torch.ones(8)}},
            "other type": _shard(4, 8, 4 * rank, torch.float64), "a part": _shard(2, 8, 2 * rank),
        }.items():
            try:
                checkpointer.load(state)
                record[name] = "loaded"
            except fs.FlowstoneError as error:
                record[name] = f"{type(error).__name__}: {error}"
    return record


# Places that are not what they seem


def in_a_mount_namespace_of_its_own() -> str | None:
    """From here on this process mounts for itself alone; why it may not."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    done = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, text=True, check=False)
    return f"mount: {done.stderr.strip()}" if done.returncode else None


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def one_does_not_see(rank: int, path: str, how: str) -> dict[str, str]:
    """Rank 1 has another directory, or an old or a foreign copy, where the others have the store; then it has not."""
    refused = in_a_mount_namespace_of_its_own() if rank == 1 else None
    record = {"refused": refused or ""}
    state = state_of(rank, 1, size=2)
    with opened(f"{path}-foreign") as checkpointer:
        checkpointer.save(1, state).committed.result(60)
    with opened(path, on_error="continue", deadline_s=20.0) as checkpointer:
        checkpointer.save(1, state).committed.result(60)
        if rank == 1 and not refused:
            if how == "foreign":
                _mount("--bind", f"{path}-{how}", path)
            else:
                _mount("-t", "tmpfs", "tmpfs", path)
        fill(state, 2)
        record["save"] = str(outcome(checkpointer, 2, state))
        fill(state, 7)
        try:
            checkpointer.load(state)
            record["load"] = "loaded"
        except fs.FlowstoneError as error:
            record["load"] = f"{type(error).__name__}: {error}"
            assert holds(state, 7), "a load that cannot be has changed something"
        if rank == 1 and not refused:
            subprocess.run(["umount", "--lazy", path], check=True)
        fill(state, 3)
        checkpointer.save(3, state).committed.result(60)
    return record


def another_path(rank: int, path: str) -> str:
    """Rank 1 was given another path."""
    with (
        mock.patch.object(exchange, "UNANSWERED_S", 2.0),
        opened(f"{path}-other" if rank else path, on_error="continue", deadline_s=600.0) as checkpointer,
    ):
        return str(outcome(checkpointer, 1, state_of(rank, 1, size=2)))


def other_clocks(rank: int, path: str) -> list[int]:
    """Clocks of ranks differ by years, and go backwards between saves; what a clock says decides nothing."""
    state = state_of(rank, 1, size=2)

    class Behind(datetime):
        @classmethod
        def now(cls, zone: object = None) -> datetime:  # type: ignore[override]
            return datetime(2001, 1, 1, tzinfo=UTC)

    clocks = []
    with ExitStack() as patches:
        if rank == 1:  # as on another machine, which was started long before
            clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e8, sleep=time.sleep)
            for module in (agreement, kv_store, exchange, failure_detector):
                patches.enter_context(mock.patch.object(module, "time", clock))
            patches.enter_context(mock.patch("time.time", return_value=1.0))
        with opened(path, keep=fs.Keep(last=2), deadline_s=20.0) as checkpointer:
            for step in (1, 2, 3):
                if step > 1:
                    patches.enter_context(mock.patch.object(publish, "datetime", Behind))
                fill(state, step)
                checkpointer.save(step, state).committed.result(60)
                if rank == 0:
                    for file in Path(path).glob("step-*"):
                        number = int(file.name.removeprefix("step-"))
                        with suppress(FileNotFoundError):  # retention goes on meanwhile
                            os.utime(file, (2e9 / number, 2e9 / number))  # the newer, the older
            clocks.append(checkpointer.load(state).step)
            assert holds(state, 3)
    return clocks


# Two jobs


def hold_the_store(rank: int, path: str) -> list[str]:
    """A job that saves into a store while another one tries to."""
    reported = []
    state = state_of(rank, 1, size=2)
    with opened(path) as checkpointer:
        for step in (1, 2):
            fill(state, step)
            reported.append(checkpointer.save(step, state).committed.result(60).manifest.id)
            Path(f"{path}.held-{rank}-{step}").touch()
            while not Path(f"{path}.over").exists():
                time.sleep(0.01)
    return reported


def try_to_intrude(rank: int, path: str) -> list[str]:
    state = state_of(rank, 1, size=2)
    reported = []
    with opened(path, on_error="continue") as checkpointer:
        for step in (1, 2, 9):
            fill(state, 50 + step)
            error = outcome(checkpointer, step, state)
            reported.append(f"{type(error).__name__} {getattr(error, 'kind', '')}: {error}")
        state = state_of(rank, 0, size=2)
        assert checkpointer.load(state).step == 1, "loads take no lock"
        assert holds(state, 1)
    return reported
