"""Forged checkpoints of each codec, drawn from a seed, with every way to read them.

    python -m hostile_codecs DIRECTORY FIRST LAST     cases FIRST to LAST - 1, up to one that breaks a promise

A case changes an index, a manifest, or the stored bytes of a chunk, and seals it again, so that the code that relies on
sizes and places reads it, and the decoders do. A read may fail with an error of Flowstone's, or return any values. It
may not end the process, raise another error, or take more memory than declared.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flowstone as fs
from flowstone.config import MIB
from flowstone.format.digest import digest
from flowstone.store.local import LocalStore
from forge import edit_index, edit_manifest
from journal_forgery import forge
from memory_taken import return_freed_memory, tried

STEP = 3
JOURNAL = "journal"
MEMORY_BYTES_MAX = 64 * MIB
"""What a reader may take, of these few megabytes: targets, a block of the arena for each window, index, buffers."""

NEAR = fs.EngineOptions(compress="max", kept_bytes=16 * MIB)
ENGINES: Mapping[str, tuple[fs.EngineOptions, list[fs.Quantize]]] = {
    "planes": (fs.EngineOptions(compress="max"), []),
    "near": (NEAR, []),
    "derived": (fs.EngineOptions(compress="derived"), []),
    "quantized": (fs.EngineOptions(compress="max"), [fs.Quantize("m.*", bits=8, block=256)]),
}


def state(step: int) -> dict[str, object]:
    torch.manual_seed(1)
    master = torch.randn(500, 1200) * 0.02 * (1 + 1e-4 * step)
    small = torch.randn(30_000) * 0.1
    tensors = {"w": master, "half": master.bfloat16(), "same": master.clone(), "small": small}
    return {"m": {**tensors, "none": torch.zeros(0, 3)}, "n": step}


class Training:
    """One layer, every step of which is in a journal."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(160, 110)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)
        self.progress = {"step": 0}

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def train_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 160)).square().mean().backward()
        self.optimizer.step()
        self.progress["step"] = step

    def bits(self) -> bytes:
        return b"".join(bytes(p.detach().reshape(-1).view(torch.uint8).numpy()) for p in self.model.parameters())


def make(directory: Path) -> None:
    """A store of each kind, with three steps; and one with a journal."""
    training = Training()
    with fs.Checkpointer(directory / JOURNAL, every_step=True) as checkpointer:
        for step in range(1, 6):
            training.train_step(step)
            checkpointer.save(step, training.state())
    for kind, (engine, rules) in ENGINES.items():
        with fs.Checkpointer(directory / kind, engine=engine, rules=rules) as checkpointer:
            for step in range(1, STEP + 1):
                checkpointer.save(step, state(step)).committed.result()


def leaves_of(document: object) -> list[tuple[Any, Any]]:
    """Everything in a document that is no dict and no list: what holds it, and under which key."""
    leaves: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        inner = waiting.pop()
        for key, value in inner.items() if isinstance(inner, dict) else enumerate(inner):  # type: ignore[arg-type]
            if isinstance(value, dict | list):
                waiting.append(value)
            leaves.append((inner, key))
    return leaves


class JournalForger:
    """Changes one frame of a journal, and undoes it."""

    def __init__(self, store: Path, seed: int) -> None:
        (self.path,) = store.glob("journal-*/rank-00000.journal")
        self.random, self._kept = random.Random(seed), self.path.read_bytes()

    def change(self) -> str:
        message = ""

        def change(row: dict[str, Any]) -> None:
            nonlocal message
            place, key = self.random.choice(leaves_of(row))
            value = place[key]
            numbers = [0, -1, 1, 3, MIB, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1, 0.5, 1e300]
            numbers += [value + 1, value * 2] if type(value) is int else []
            place[key] = self.random.choice([*numbers, None, "", "x", [], {}, [0], True])
            message = f"{key} = {place[key]!r}"

        number = self.random.randrange(5)
        try:
            forge(self.path, number, change)
        except AssertionError:  # it does not fit into the frame
            return "nothing"
        return f"frame {number}, {message}"

    def undo(self) -> None:
        self.path.write_bytes(self._kept)


class Forger:
    """Changes one step of a store, and undoes it."""

    def __init__(self, store: Path, seed: int) -> None:
        self.checkpoint = store / f"step-{STEP:08d}"
        self.random = random.Random(seed)
        self._kept = {name: (self.checkpoint / name).read_bytes() for name in ("manifest.json", "index.safetensors")}
        self._undo: list[tuple[Path, int, bytes]] = []

    def change(self) -> str:
        """Returns what."""
        kinds: list[Callable[[], str]] = [self._cell, self._cell, self._field, self._chunk, self._chunk, self._column]
        return " and ".join(self.random.choice(kinds)() for _ in range(self.random.choice((1, 1, 1, 2))))

    def undo(self) -> None:
        for path, offset, data in reversed(self._undo):
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(data)
        self._undo.clear()
        for name, data in self._kept.items():
            (self.checkpoint / name).write_bytes(data)

    def _number(self, kind: np.dtype, like: np.ndarray) -> int:
        largest = int(np.iinfo(kind).max)
        near = int(self.random.choice(like.tolist())) if like.size else 0
        drawn = self.random.choice([
            0, 1, 2, 3, 4, 5, 255, 4095, 4096, MIB - 1, MIB, MIB + 1, largest, largest - 1, largest // 2,
            near, near + 1, near - 1, near * 2, near ^ (1 << self.random.randrange(kind.itemsize * 8)),
            self.random.randrange(largest),
        ])
        return drawn % (largest + 1)

    def _cell(self) -> str:
        message = ""

        def change(columns: dict[str, np.ndarray]) -> None:
            nonlocal message
            names = [name for name, column in columns.items() if isinstance(column, np.ndarray) and column.size
                     and np.issubdtype(column.dtype, np.integer)]
            name = self.random.choice(names)
            column = columns[name].reshape(-1)
            offset = self.random.randrange(column.size)
            value = self._number(np.dtype(f"u{column.dtype.itemsize}"), column.view(f"u{column.dtype.itemsize}"))
            column.view(f"u{column.dtype.itemsize}")[offset] = value
            message = f"{name}[{offset}] = {value}"

        edit_index(self.checkpoint, change)
        return message

    def _column(self) -> str:
        message = ""

        def change(columns: dict[str, np.ndarray]) -> None:
            nonlocal message
            name = self.random.choice([name for name, column in columns.items() if isinstance(column, np.ndarray)])
            column, how = columns[name], self.random.choice(["none", "half", "twice", "turned", "zero"])
            flat = column.reshape(-1)
            made = {"none": flat[:0], "half": flat[: flat.size // 2], "twice": np.concatenate([flat, flat]),
                    "turned": flat[::-1].copy(), "zero": np.zeros_like(flat)}[how]
            columns[name] = made
            message = f"{name}: {how}"

        edit_index(self.checkpoint, change)
        return message

    def _field(self) -> str:
        message = ""

        def change(manifest: dict[str, Any]) -> None:
            nonlocal message
            place, key = self.random.choice([(of, key) for of, key in leaves_of(manifest) if type(of[key]) is int])
            numbers = [0, -1, 1, MIB, 1 << 31, 1 << 62, 1 << 63, 1 << 64, place[key] + 1, place[key] * 2]
            value = place[key] = self.random.choice(numbers)
            message = f"manifest {key} = {value}"

        edit_manifest(self.checkpoint, change)
        return message

    def _chunk(self) -> str:
        """What is stored for a chunk, or for its base, is changed, and vouched for."""
        message = ""

        def change(columns: dict[str, np.ndarray]) -> None:
            nonlocal message
            prefix = self.random.choice([key for key in ("chunk.", "chunk.base_") if f"{key}offset" in columns] or [""])
            if not prefix or f"{prefix}bytes" not in columns:
                return
            names = [f"{prefix}{name}" for name in ("offset", "bytes", "segment", "digest")]
            count = min(columns[name].size for name in names)  # a change before this one may have made one longer
            position = self.random.randrange(columns[f"{prefix}offset"].size or 1)
            if position >= count or not int(columns[f"{prefix}bytes"][position]):
                return
            rows = json.loads((self.checkpoint / "manifest.json").read_bytes())["segments"]
            path = self.checkpoint / rows[int(columns[f"{prefix}segment"][position]) % len(rows)]["name"]
            offset, length = int(columns[f"{prefix}offset"][position]), int(columns[f"{prefix}bytes"][position])
            data = path.read_bytes()[offset : offset + length]
            if not data:
                return
            bad = bytearray(data)
            for _ in range(self.random.choice((1, 1, 4, 60))):
                limit = len(bad) if self.random.random() < 0.4 else min(len(bad), 400)  # lengths and tables come first
                byte = self.random.choice((0, 1, 127, 128, 255, self.random.randrange(256)))
                bad[self.random.randrange(limit)] = byte
            shorter = self.random.random() < 0.2
            if shorter:
                del bad[self.random.randrange(1, len(bad) + 1) :]
                columns[f"{prefix}bytes"][position] = len(bad)
            self._undo.append((path, offset, data))
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(bad)
            columns[f"{prefix}digest"][position] = int(digest(bytes(bad)), 16)
            message = f"{prefix}{position}: {'shorter ' if shorter else ''}bytes"

        edit_index(self.checkpoint, change)
        return message or "nothing"


def ways(store: Path) -> dict[str, Callable[[], object]]:
    if store.name == JOURNAL:
        return {"load": lambda: replayed(store)}

    def read() -> None:
        checkpoint = fs.open(store, STEP)
        for name in list(checkpoint.tensors):
            checkpoint.read(name)

    def load() -> None:
        into = state(0)
        with fs.Checkpointer(store) as checkpointer:
            checkpointer.load(into, step=STEP)

    def verify() -> None:
        fs.open(store, STEP).inspect()

    return {"read": read, "load": load, "verify": verify}


def replayed(store: Path) -> None:
    with fs.Checkpointer(LocalStore(store)) as checkpointer:
        checkpointer.load(Training().state())


def campaign(directory: Path, first: int, last: int) -> dict[str, int]:
    """Cases by their numbers. Returns how often each outcome came. Raises AssertionError for a broken promise."""
    kinds, counts = [*ENGINES, JOURNAL], dict[str, int]()
    peak = 0
    return_freed_memory()
    for kind in kinds:
        for way in ways(directory / kind).values():
            way()  # what is imported, and mapped once, is no case's
    for number in range(first, last):
        kind = kinds[number % len(kinds)]
        forger = (JournalForger if kind == JOURNAL else Forger)(directory / kind, number)
        try:
            reported = forger.change()
            for name, way in ways(directory / kind).items():
                print(f"case {number}: {kind}, {reported}, {name}", file=sys.stderr, flush=True)
                outcome, taken = tried(way)
                counts[f"{kind} {outcome}"] = counts.get(f"{kind} {outcome}", 0) + 1
                peak = max(peak, taken)
                assert taken < MEMORY_BYTES_MAX, f"case {number} ({kind}, {reported}): {name} took {taken >> 20} MiB"
        finally:
            forger.undo()
    counts["peak MiB"] = peak >> 20
    return counts


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if not place.exists():
        make(place)
    try:
        print(json.dumps(campaign(place, *map(int, sys.argv[2:4]))))
    finally:
        shutil.rmtree(place, ignore_errors=True)
