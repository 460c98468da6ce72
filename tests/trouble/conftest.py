"""Disks with faults, really mounted, if this process may mount them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faulty_disk import FaultyDisk, faulty_disk

Mount = Callable[..., Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    """A disk that does to requests what the test asks of it."""
    path = tmp_path / "faulty"
    path.mkdir()
    with faulty_disk(path) as mounted:
        yield mounted


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts `mount` of these arguments; skips where that is refused. Gone after the test, last one first."""
    mounted: list[Path] = []

    def at(*arguments: str) -> Path:
        target = tmp_path / f"mount{len(mounted)}"
        target.mkdir()
        if os.geteuid() != 0:
            pytest.skip("mounting needs root")
        done = subprocess.run(["mount", *arguments, str(target)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mount {' '.join(arguments)} was refused: {done.stderr.strip()}")
        mounted.append(target)
        return target

    yield at
    for target in reversed(mounted):
        subprocess.run(["umount", "--lazy", str(target)], check=True)


@pytest.fixture
def loop(mount: Mount, tmp_path: Path) -> Mount:
    """Mounts a file of `mib` MiB as a disk, formatted by `mkfs` of these arguments; skips where there is none."""

    def at(mib: int, mkfs: str, *arguments: str) -> Path:
        tool = shutil.which(mkfs, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if tool is None:
            pytest.skip(f"no {mkfs} on this machine")
        image = tmp_path / f"{mkfs}.img"
        with image.open("wb") as file:
            file.truncate(mib << 20)
        subprocess.run([tool, *arguments, str(image)], check=True, capture_output=True)
        return mount("-o", "loop", str(image))

    return at
