"""A small checkpoint of every readable format, by the project's own writers; and other objects in a file's place."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from deepspeed_layout import job

import flowstone as fs

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
PATIENCE_S = 60
MEMORY_BYTES = 1 << 30


@contextmanager
def limited() -> Iterator[None]:
    """A call that stands still, or takes more memory than that, ends with an error of Python's own."""

    def expired(*_: object) -> None:
        raise TimeoutError("it stands still")

    before, limits = signal.signal(signal.SIGALRM, expired), resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, limits[1]))
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _saved(place: Path) -> Path:
    with fs.Checkpointer(place / "run") as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3)}}).committed.result()
    return place / "run"


def _safetensors(place: Path) -> Path:
    fs.export(_saved(place), place / "hf", shard_bytes=50)
    (place / "hf" / "config.json").write_text('{"model_type": "none"}')
    return place / "hf"


def _torch(place: Path) -> Path:
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"model": {"w": weight, "t": weight.t()}, "step": 3, "tags": {"a"}, "betas": (0.9, 0.99)}
    torch.save(state, place / "a.pt")
    return place / "a.pt"


def _dcp(place: Path) -> Path:
    fs.export(_saved(place), place / "dcp", to="dcp")
    return place / "dcp"


def _orbax(place: Path) -> Path:
    from test_orbax_files import write

    arrays = {"params.w": np.arange(12, dtype=np.float32).reshape(3, 4), "params.b": np.ones(3, np.float32)}
    values = {"step": ("scalar", 7), "notes.0": ("string", "warm")}
    return write(place / "orbax", arrays, values, chunks={"params.w": (2, 2)}, is_database=False)


def _copy(name: str) -> Callable[[Path], Path]:
    return lambda place: Path(shutil.copytree(GOLDEN / name, place / name))


FORMATS: dict[str, Callable[[Path], Path]] = {
    "flowstone": _saved, "safetensors": _safetensors, "torch": _torch, "dcp": _dcp, "megatron": _copy("megatron"),
    "deepspeed": lambda place: job().write(place / "ds"),
    "universal": lambda place: job().write_universal(place / "ds"),
    "torchsnapshot": _copy("torchsnapshot"), "orbax": _orbax,
}
"""Makes one in a directory, and says where it is."""


def archive(path: Path, pickled: bytes) -> Path:
    """A file of torch.save with that pickle, and one storage of four floats."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as opened:
        for name, content in (("data.pkl", pickled), ("byteorder", b"little"), ("data/0", bytes(16))):
            opened.writestr(f"a/{name}", content)
    return path


def _socket(path: Path) -> None:
    bound = socket.socket(socket.AF_UNIX)
    place = os.open(path.parent, os.O_PATH)
    try:
        bound.bind(f"/proc/self/fd/{place}/{path.name}")  # a socket's path is short
    finally:
        os.close(place)
        bound.close()


def _sparse(path: Path) -> None:
    with path.open("wb") as opened:
        opened.truncate(1 << 42)


STRANGE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo, "a socket": _socket, "a directory": os.mkdir,
    "a link in a circle": lambda path: path.symlink_to(path.name),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a pipe": lambda path: (os.mkfifo(f"{path}.pipe"), path.symlink_to(f"{path.name}.pipe")),
    "nothing but a hole": _sparse, "an empty file": lambda path: path.touch(),
}
"""Puts something that is no sound file at a path."""
