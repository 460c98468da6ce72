"""The end of a process: saves in flight are completed, and lost saves are reported."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flowstone as fs

Script = Callable[..., "subprocess.Popen[str]"]

# A save that is still being committed when the script's last line has run: the commit waits for `over`, which
# an exit handler sets. Not one of `atexit`: before those, Python waits for the threads of executors.
_SLOW_COMMIT = """
import sys, threading, torch, flowstone as fs
at_exit = threading._register_atexit
from flowstone.commit import publish
over = threading.Event()
real = publish.publish
def publish_after_the_script(*args, **more):
    over.wait(60)
    return real(*args, **more)
publish.publish = publish_after_the_script
"""


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_a_script_that_ends_with_a_save_in_flight_waits_for_it(store: Path, warm_script: Script) -> None:
    text = _SLOW_COMMIT + (
        "checkpointer = fs.Checkpointer(sys.argv[1])\n"
        "save = checkpointer.save(1, {'x': torch.ones(1 << 20)})\n"
        "at_exit(over.set)\n"
        "print(save.committed.done())\n"
    )
    assert finished(warm_script(text, store)) == (0, "False\n", "")
    assert fs.open(store).verify().step == 1


def test_a_script_without_a_save_ends_as_if_nothing_were_there(store: Path, warm_script: Script) -> None:
    text = "import sys, flowstone as fs\ncheckpointer = fs.Checkpointer(sys.argv[1])\nprint(checkpointer.latest())\n"
    assert finished(warm_script(text, store)) == (0, "None\n", "")
    assert not store.exists()


def test_a_script_that_saves_every_step_ends_with_the_last_one_durable_and_tells_nothing(
    store: Path, warm_script: Script
) -> None:
    text = (
        "import sys, torch, flowstone as fs\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "checkpointer = fs.Checkpointer(sys.argv[1], every_step=True)\n"
        "for step in range(1, 5):\n"
        "    model(torch.ones(4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    checkpointer.save(step, {'model': model, 'optimizer': optimizer})\n"
    )
    assert finished(warm_script(text, store)) == (0, "", "")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with fs.Checkpointer(store) as checkpointer:
        assert checkpointer.load({"model": model, "optimizer": optimizer}).step == 4


_LOST = (
    "import shutil\n"
    "checkpointer = fs.Checkpointer(sys.argv[1])\n"
    "save = checkpointer.save(12, {'x': torch.ones(1 << 20)})\n"
    "def lose():\n    shutil.rmtree(sys.argv[1])\n    over.set()\n"
)


def test_a_lost_last_save_ends_the_process_with_a_failure_that_names_the_step(store: Path, warm_script: Script) -> None:
    status, out, err = finished(warm_script(_SLOW_COMMIT + _LOST + "at_exit(lose)\nprint('done')\n", store))
    assert (status, out) == (1, "done\n"), err
    assert err.startswith("flowstone: step 12 was not saved: cannot write ")
    assert "earlier checkpoints are untouched" in err
    assert "Traceback" not in err


def test_a_lost_last_save_on_a_full_disk_ends_the_process_with_a_failure(
    small_disk: Callable[[int], Path], warm_script: Script
) -> None:
    disk = small_disk(2 << 20)
    text = _SLOW_COMMIT + (
        "import os, pathlib\n"
        "checkpointer = fs.Checkpointer(sys.argv[1])\n"
        "checkpointer.save(1, {'x': torch.ones(1000)})\n"
        "over.set()\n"
        "checkpointer.wait()\n"
        "over.clear()\n"
        "checkpointer.save(2, {'x': torch.ones(1000)})\n"
        "def fill():\n"
        "    free = os.statvfs(sys.argv[1])\n"
        "    pathlib.Path(sys.argv[1] + '.ballast').write_bytes(bytes(free.f_bavail * free.f_frsize))\n"
        "    over.set()\n"
        "at_exit(fill)\n"
    )
    status, _, err = finished(warm_script(text, disk / "run"))
    assert status == 1, err
    assert err.startswith("flowstone: step 2 was not saved: no space to ")
    assert "needed" in err
    assert "newest      step 1" in err
    assert fs.open(disk / "run").verify().step == 1


def test_a_failure_that_was_seen_does_not_end_the_process_with_a_failure(store: Path, warm_script: Script) -> None:
    text = _SLOW_COMMIT + _LOST + "lose()\nprint(type(save.committed.exception()).__name__)\n"
    assert finished(warm_script(text, store)) == (0, "StorageError\n", "")


def test_an_exception_of_the_users_is_not_masked_by_a_lost_save(store: Path, warm_script: Script) -> None:
    text = _SLOW_COMMIT + (
        "import shutil\n"
        "with fs.Checkpointer(sys.argv[1]) as checkpointer:\n"
        "    checkpointer.save(12, {'x': torch.ones(1 << 20)})\n"
        "    shutil.rmtree(sys.argv[1])\n"
        "    over.set()\n"
        "    raise ZeroDivisionError('the user erred')\n"
    )
    status, _, err = finished(warm_script(text, store))
    assert status == 1
    assert err.rstrip().endswith("ZeroDivisionError: the user erred")
    assert "step 12 was not saved" in err


@pytest.mark.parametrize("status", [0, 3])
def test_an_exit_status_of_the_users_stays(store: Path, warm_script: Script, status: int) -> None:
    text = _SLOW_COMMIT + (
        "checkpointer = fs.Checkpointer(sys.argv[1])\n"
        "checkpointer.save(1, {'x': torch.ones(1 << 20)})\n"
        "at_exit(over.set)\n"
        f"sys.exit({status})\n"
    )
    assert finished(warm_script(text, store))[0] == status
    assert fs.open(store).verify().step == 1


def test_an_uncaught_exception_still_saves_what_was_captured(store: Path, warm_script: Script) -> None:
    text = _SLOW_COMMIT + (
        "checkpointer = fs.Checkpointer(sys.argv[1])\n"
        "checkpointer.save(1, {'x': torch.ones(1 << 20)})\n"
        "at_exit(over.set)\n"
        "raise ZeroDivisionError('the user erred')\n"
    )
    status, _, err = finished(warm_script(text, store))
    assert (status, "the user erred" in err) == (1, True)
    assert fs.open(store).verify().step == 1


# A save that captures within an overlap budget without end, until something expedites it.
_OVERLAP = """
import atexit, sys, torch, flowstone as fs
from flowstone.store.base import Pace
from flowstone.save.pacing import Captures
Captures.pace = lambda *_: Pace(1, 1)
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = {'model': model, 'optimizer': optimizer}
def train(path):
    checkpointer = fs.Checkpointer(path, engine=fs.EngineOptions(request_bytes=2 << 20))
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    print(checkpointer.save(1, state).captured.done(), flush=True)
    return checkpointer
"""


def test_the_end_of_a_script_ends_the_overlap_budget(store: Path, script: Script) -> None:
    assert finished(script(_OVERLAP + "checkpointer = train(sys.argv[1])\n", store)) == (0, "False\n", "")
    assert fs.open(store).verify().step == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_end_of_a_process_of_multiprocessing_ends_the_overlap_budget(
    store: Path, warm_script: Script, method: str
) -> None:
    text = _OVERLAP + (
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        f"    child = multiprocessing.get_context('{method}').Process(target=train, args=(sys.argv[1],))\n"
        "    child.start()\n"
        "    child.join()\n"
        "    print(child.exitcode)\n"
    )
    assert finished(warm_script(text, store)) == (0, "False\n0\n", "")
    assert fs.open(store).verify().step == 1


def test_a_save_that_comes_after_the_end_is_refused(store: Path, script: Script) -> None:
    text = _OVERLAP + (
        "checkpointer = train(sys.argv[1])\n"
        "def late():\n"
        "    try:\n        checkpointer.save(2, state)\n"
        "    except fs.ClosedError as error:\n        print(error)\n"
        "atexit.register(late)\n"
    )
    status, out, err = finished(script(text, store))
    assert (status, err) == (0, ""), err
    assert "cannot save step 2: Python is shutting down" in out
    assert fs.open(store).verify().step == 1
    assert not list(store.glob(".saving-*"))


def test_a_killed_process_leaves_the_checkpoint_before(store: Path, warm_script: Script) -> None:
    text = _SLOW_COMMIT + (
        "checkpointer = fs.Checkpointer(sys.argv[1])\n"
        "over.set()\n"
        "checkpointer.save(1, {'x': torch.ones(1 << 20)}).committed.result()\n"
        "over.clear()\n"
        "checkpointer.save(2, {'x': torch.zeros(1 << 20)})\n"
        "print('saving', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = warm_script(text, store)
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(list(store.glob(".saving-00000002-*"))) == 1
    assert fs.open(store).verify().step == 1
    import torch

    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(2, {"x": torch.ones(3)})
    assert not list(store.glob(".saving-*"))


def test_ctrl_c_during_a_save_leaves_the_checkpoint_before(store: Path, warm_script: Script) -> None:
    """The capture is interrupted where it waits: nothing is committed, nothing is left, later saves work."""
    text = (
        "import os, signal, sys, torch, flowstone as fs\n"
        "from flowstone.store.local_io import LocalWriteHandle\n"
        "checkpointer = fs.Checkpointer(sys.argv[1])\n"
        "checkpointer.save(1, {'x': torch.ones(3)}).committed.result()\n"
        "real = LocalWriteHandle.wait_captured\n"
        "def interrupted(self):\n    os.kill(os.getpid(), signal.SIGINT)\n    real(self)\n"
        "LocalWriteHandle.wait_captured = interrupted\n"
        "try:\n    checkpointer.save(2, {'x': torch.zeros(1 << 20)})\n"
        "except KeyboardInterrupt:\n    print('interrupted', sorted(os.listdir(sys.argv[1]))[-1])\n"
        "LocalWriteHandle.wait_captured = real\n"
        "checkpointer.save(2, {'x': torch.full((3,), 2.0)})\n"
    )
    assert finished(warm_script(text, store)) == (0, "interrupted step-00000001\n", "")
    assert fs.open(store).read("x").tolist() == [2, 2, 2]
    assert not list(store.glob(".saving-*"))
