"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import settings

import flowstone as fs
import small_state
from flowstone.state import describe
from forge import split_rows
from warm_start import warm_start


def pytest_configure() -> None:
    """No example has to end in time: machines are busy. And what tests start can be interrupted by Ctrl-C.

    Shells start what runs in the background with Ctrl-C ignored, which is inherited. torch looks up the name of every
    address that its stores connect to, for its log: where an answer is lost, that takes a second, and not five.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: Python does not look for garbage there later on, for half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _config_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty directory for the user's files: what somebody tuned on this machine is none of the tests' business."""
    with mock.patch.dict(os.environ, XDG_CONFIG_HOME=str(tmp_path_factory.mktemp("config"))):
        yield


@pytest.fixture(scope="session")
def memory_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in memory, if the machine has such a place: for hundreds of commits that are not about the disk, and
    would wait for it."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path_factory.mktemp("memory")
        return
    with TemporaryDirectory(prefix="flowstone-tests-", dir=shared) as path:
        yield Path(path)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where a store may be made; nothing is there yet."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one checkpoint of the reference state; not to be changed."""
    store = tmp_path_factory.mktemp("pristine") / "run"
    split = lambda state, **how: split_rows(describe(state, **how), "table", 2)  # noqa: E731
    with mock.patch("flowstone.save.planning.describe", split), fs.Checkpointer(store) as checkpointer:
        checkpointer.save(small_state.STEP, small_state.state())
    return store


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """A copy of that checkpoint, in a store of its own."""
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run" / f"step-{small_state.STEP:08d}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes; skips where this process may not mount."""
    mounted: list[Path] = []

    def mount(size_bytes: int) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
        if os.geteuid() != 0:
            pytest.skip("a full disk needs a small mount, which needs root")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a full disk needs a small mount, which was refused: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a Python program from its text, as a user would; what it needs comes in `arguments`."""

    def start(text: str, *arguments: object) -> subprocess.Popen[str]:
        path = tmp_path / f"script{len(list(tmp_path.glob('script*.py')))}.py"
        path.write_text(text)
        return subprocess.Popen(
            [sys.executable, str(path), *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )

    return start


@pytest.fixture
def warm() -> Iterator[None]:
    """Texts that the test runs by `python -c` are forked from a process that has torch, but the first of all."""
    with warm_start("-c"):
        yield


@pytest.fixture
def warm_script(script: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """As `script`, for programs that import torch: the first of them all is started, the others are forked."""

    def start(text: str, *arguments: object) -> subprocess.Popen[str]:
        names = [str(tmp_path / f"script{number}.py") for number in range(10)]
        with warm_start(*names, name="script", whole_end=True):
            return script(text, *arguments)

    return start
