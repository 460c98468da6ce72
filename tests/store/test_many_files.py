"""Checkpoints of more segments than a process may open files: only needed ones are opened, a few at a time."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

import flowstone as fs
from flowstone.plan import write
from flowstone.store.engines import EngineChoice
from own_process import run_in_own_process

TENSORS = 150
FILES_MAX = 100  # of a process; some are open before anything is read
LONG = "x" * 3000  # a header of 4096 bytes has room for one such name


def _state(value: float) -> dict[str, object]:
    return {"weights": {f"{LONG}{number}": torch.full((4,), value + number) for number in range(TENSORS)}}


def _saved(path: Path) -> Path:
    with (
        mock.patch("flowstone.save.plan_cache.plan_writes", partial(write.plan_writes, header_bytes_max=4096)),
        fs.Checkpointer(path) as checkpointer,
    ):
        checkpointer.save(1, _state(1.0)).committed.result()
    assert len(list((path / "step-00000001").glob("*.safetensors"))) > TENSORS
    return path


class _Opened:
    """What was opened to be read, and how many descriptors there were at most."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.most = 0


@contextmanager
def _counted() -> Iterator[_Opened]:
    opened, real = _Opened(), EngineChoice.open_to_read

    def open_to_read(engines: EngineChoice, path: Path, *rest: object) -> tuple[int, int]:
        result = real(engines, path, *rest)  # type: ignore[arg-type]
        opened.paths.append(str(path))
        opened.most = max(opened.most, len(os.listdir("/proc/self/fd")))
        return result

    with mock.patch.object(EngineChoice, "open_to_read", open_to_read):
        yield opened


def _read_with_few_files(path: Path) -> tuple[int, int, int, int]:
    """How many files were opened to read one tensor, to verify, to load; the most that were open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_MAX, FILES_MAX))
    counts = []
    with _counted() as caught:
        assert torch.equal(fs.open(path).read(f"weights.{LONG}7"), torch.full((4,), 8.0))
    counts.append(len(caught.paths))
    with _counted() as verified:
        fs.open(path).verify()
    counts.append(len(verified.paths))
    before = len(os.listdir("/proc/self/fd"))
    with _counted() as loaded, fs.Checkpointer(path) as checkpointer:
        state = _state(0.0)
        checkpointer.load(state)
        wanted = _state(1.0)["weights"]
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in state["weights"].items())  # type: ignore[attr-defined,index]
    counts.append(len(loaded.paths))
    return counts[0], counts[1], counts[2], max(caught.most, verified.most, loaded.most) - before


def test_more_segments_than_open_files_are_read_some_at_a_time(tmp_path: Path) -> None:
    caught, verified, loaded, most = run_in_own_process(_read_with_few_files, _saved(tmp_path / "run"))
    assert caught == 1
    assert verified == loaded == TENSORS
    assert most < FILES_MAX // 2


def _descriptors_taken(path: Path) -> bool:
    """Load while so many descriptors are taken that a whole lot of files finds no room."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
    state = _state(0.0)
    with fs.Checkpointer(path) as checkpointer:
        checkpointer.load(state)  # what it needs besides is there
        taken = []
        while len(os.listdir("/proc/self/fd")) < 400 - 20:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        state = _state(0.0)
        checkpointer.load(state)
        for fd in taken:
            os.close(fd)
    wanted = _state(1.0)["weights"]
    return all(torch.equal(tensor, wanted[name]) for name, tensor in state["weights"].items())  # type: ignore[attr-defined,index]


def test_descriptors_that_others_have_taken_make_lots_smaller(tmp_path: Path) -> None:
    assert run_in_own_process(_descriptors_taken, _saved(tmp_path / "run"))


def _damaged(path: Path) -> tuple[list[str], list[str], str]:
    """Files that are damaged, those that `verify` names, and what a load says."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_MAX, FILES_MAX))
    segments = sorted((path / "step-00000001").glob("rank-*.safetensors"))
    damaged = [segments[3], segments[-9]]  # of different lots
    for segment in damaged:
        text = bytearray(segment.read_bytes())
        text[4096] ^= 1  # behind the header
        segment.write_bytes(text)
    with pytest.raises(fs.DamagedError) as verified:
        fs.open(path).verify()
    names = [segment.name for segment in segments if f"{segment.name}:" in str(verified.value)]
    with pytest.raises(fs.DamagedError) as loaded, fs.Checkpointer(path) as checkpointer:
        checkpointer.load(_state(0.0))
    return [segment.name for segment in damaged], names, str(loaded.value)


def test_verify_names_the_damage_in_every_lot_and_a_load_stops_at_the_first(tmp_path: Path) -> None:
    damaged, actual, message = run_in_own_process(_damaged, _saved(tmp_path / "run"))
    assert actual == damaged
    assert damaged[0] in message
    assert damaged[1] not in message
