"""A node whose clock is days off: copies, commits, restores, locks and leases compare no clocks of different nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from peer_acts import SECRET

import flowstone as fs
from flowstone.errors import LockedError
from flowstone.store.memory.agent_client import stop_agent
from flowstone.store.peers.store import PeerMemory
from memory_agent import agent_process, kill
from other_clock import DAY_S, compiler, environment
from peer_nodes import agent_below, at, nodes_below
from warm_start import warm_start

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler, to put another clock before the C library's")

HERE = Path(__file__).resolve().parent
NODES, PATIENCE_S = 2, 60.0
T = TypeVar("T")
_RANK = f"""
import json, sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}, {str(HERE.parent / "support")!r}]
import processes
processes._become_rank(*json.loads(sys.argv[1]))
"""


@pytest.fixture
def base() -> Iterator[Path]:
    with nodes_below(NODES) as place:
        yield place


def _run(off_s: dict[int, int], files: Path, act: str, *arguments: object) -> list[object]:
    """What an act of tests/ranks/peer_acts.py returns on each rank. `off_s`: by how much ranks' clocks are off."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = []
    for rank in range(NODES):
        where, path = [store.port, "127.0.0.1", ""], files / f"{act}-{rank}"
        path.unlink(missing_ok=True)
        words = json.dumps([rank, NODES, where, "peer_acts", act, json.dumps(arguments), str(path)])
        command = [sys.executable, "-c", _RANK, words]
        if rank in off_s:
            ranks.append(subprocess.Popen(command, env=os.environ | environment(files, off_s[rank])))
        else:
            with warm_start("-c"):
                ranks.append(subprocess.Popen(command))
    try:
        codes = [process.wait(120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    text = "\n".join((files / f"{act}-{rank}.said").read_text() for rank in range(NODES))
    assert codes == [0] * NODES, text
    return [json.loads((files / f"{act}-{rank}").read_text()) for rank in range(NODES)]


def _clock_of_agent(base: Path, node: int) -> int:
    """By how many seconds an agent's clock is off, as it was started."""
    reported = Path(f"/proc/{agent_process(agent_below(base, node))}/environ").read_bytes().split(b"\0")
    return next((int(name.partition(b"=")[2]) for name in reported if name.startswith(b"OTHER_CLOCK_S=")), 0)


def _created(base: Path, node: int, step: int) -> float:
    """When the checkpoint was made, by its writer's clock: seconds from now on."""
    with at(agent_below(base, node)):
        manifest = json.loads(fs.NodeMemory("run").read(f"step-{step:08d}/manifest.json"))
    return datetime.fromisoformat(manifest["created"]).timestamp() - datetime.now(UTC).timestamp()


def test_nodes_whose_clocks_are_days_apart_save_lose_a_node_and_restore(base: Path, tmp_path: Path) -> None:
    held = _run({1: -5 * DAY_S}, tmp_path, "save", str(base), 2, 1, 2)
    assert [_clock_of_agent(base, node) for node in range(NODES)] == [0, -5 * DAY_S]
    assert all(len(names) == 5 for names in held), "both segments are on both nodes"  # type: ignore[arg-type]
    assert abs(_created(base, 1, 2)) < DAY_S / 2, "rank 0 has made it"

    kill(agent_process(agent_below(base, 0)), signal.SIGKILL)
    assert _run({1: -5 * DAY_S}, tmp_path, "load", str(base), 2) == [[2, "", ""]] * NODES, "from the other clock's node"

    with at(agent_below(base, 0)):
        stop_agent(60.0)  # the next one is started with the next clock
    _run({0: 9 * DAY_S}, tmp_path, "save", str(base), 2, 3)
    assert [_clock_of_agent(base, node) for node in range(NODES)] == [9 * DAY_S, -5 * DAY_S]
    assert abs(_created(base, 1, 3) - 9 * DAY_S) < DAY_S / 2, "it comes from a later day"
    _run({0: -9 * DAY_S}, tmp_path, "save", str(base), 2, 4)
    assert abs(_created(base, 0, 4) + 9 * DAY_S) < DAY_S / 2, "the newer step comes from an earlier day"
    kill(agent_process(agent_below(base, 1)), signal.SIGKILL)
    assert _run({}, tmp_path, "load", str(base), 2) == [[4, "", ""]] * NODES


_HOLD = """
import sys
import numpy as np
import flowstone as fs
from flowstone.store.objects.store import ObjectStore

secret, url = sys.argv[1:]
store = ObjectStore(url, lease_s=3.0) if url else fs.PeerMemory("run", secret=secret, interface="127.0.0.1")
checkpointer = fs.Checkpointer(store)
checkpointer.save(1, {"w": np.ones(1000)}).committed.result(60)
print("holds", flush=True)
sys.stdin.readline()
"""


@contextmanager
def _holder(files: Path, off_s: int, url: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process with that clock that has saved, and goes on holding the lock, until it is killed."""
    command, env = [sys.executable, "-c", _HOLD, SECRET, url], os.environ | environment(files, off_s)
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "holds\n"
            yield started
        finally:
            started.kill()


def _once_free(take: Callable[[], T]) -> T:
    """What a call returns that needs the lock of a process that was killed: its end is noticed some time later."""
    began = time.monotonic()
    while True:
        try:
            return take()
        except LockedError:
            assert time.monotonic() - began < PATIENCE_S, "it holds the lock no longer"
            time.sleep(0.01)


@pytest.mark.parametrize("off_s", [-5 * DAY_S, 5 * DAY_S])
def test_a_lock_that_a_process_with_another_clock_holds_stands_until_that_ends(
    base: Path, tmp_path: Path, off_s: int
) -> None:
    with at(agent_below(base, 0)):
        store = PeerMemory("run", secret=SECRET, interface="127.0.0.1")
        with _holder(tmp_path, off_s) as other, fs.Checkpointer(store) as checkpointer:
            with pytest.raises(LockedError):
                checkpointer.save(2, {"w": np.ones(1000)})
            other.kill()
            other.wait()
            saved = checkpointer.save(2, {"w": np.full(1000, 2.0)})
            saved.committed.result(60)
            assert checkpointer.load({"w": np.zeros(1000)}).step == 2


def test_a_lease_that_a_process_with_another_clock_renews_stands_until_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bucket, as if on another machine: it is judged by whether it changes, not by what is written there."""
    pytest.importorskip("moto")
    from flowstone.store import holders
    from flowstone.store.objects.store import ObjectStore
    from object_server import BUCKET, serving

    url = f"s3://{BUCKET}/clock"
    with serving(), _holder(tmp_path, -5 * DAY_S, url) as other:
        monkeypatch.setattr(holders, "machine_and_process", lambda: ("another machine", "1 1"))
        store = ObjectStore(url, lease_s=3.0)
        with pytest.raises(LockedError):
            store.lock("this job")
        other.kill()
        other.wait()
        _once_free(lambda: store.lock("this job"))
        store.check_lock()
        store.close()
