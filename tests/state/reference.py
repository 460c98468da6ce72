"""The smallest checkpoint: objects as JSON text, tensors as bytes in a dictionary.

It uses the same parts of the state layer as saves and loads do: names, boxes, memory, order.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from flowstone.format import objects
from flowstone.state import Restoration, StateDescription, StoredState, TensorSpec, describe, prepare
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Memory
from forge import memory_at
from strategies import raw_bytes, strided_bytes


def on_device(memory: Memory) -> torch.Tensor:
    """A GPU's memory as a tensor of bytes."""
    interface = {
        "data": (memory.address, False), "shape": (*memory.shape, memory.item_bytes),
        "strides": (*memory.strides_bytes, 1), "typestr": "|u1", "version": 2,
    }
    return torch.as_tensor(type("Interface", (), {"__cuda_array_interface__": interface})(), device=memory.device)


def read(memory: Memory) -> np.ndarray:
    if memory.device != "cpu" and 0 not in memory.shape:
        return on_device(memory).cpu().numpy()
    return strided_bytes(memory.address, memory.shape, memory.strides_bytes, memory.item_bytes)


def write(memory: Memory, elements: np.ndarray) -> None:
    if memory.device != "cpu" and 0 not in memory.shape:
        on_device(memory).copy_(torch.from_numpy(elements))
        return
    read(memory)[...] = elements


@dataclass
class Checkpoint:
    """What was saved; `tensors` are whole, put together from the boxes of every rank."""

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    per_rank: list[dict[str, str]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def save(state: Mapping[str, object], *, rank: int = 0, into: Checkpoint | None = None) -> Checkpoint:
    """Describe, and copy at once."""
    return store(describe(state, rank=rank), into=into)


def store(described: StateDescription, *, into: Checkpoint | None = None) -> Checkpoint:
    checkpoint = Checkpoint() if into is None else into
    assert len(described.pieces) == len(described.places.address) == len(described.lazy)
    names = {(piece.name, piece.box) for piece in described.pieces} | {alias.name for alias in described.aliases}
    assert len(names) == len(described.pieces) + len(described.aliases), "a name twice"
    for piece, memory in zip(described.pieces, memory_at(described.pieces, described.places), strict=True):
        assert memory.shape == piece.box.shape
        assert memory.item_bytes == piece.dtype.item_bytes
        assert piece.box.inside(piece.shape)
        whole = checkpoint.tensors.setdefault(piece.name, np.zeros((*piece.shape, memory.item_bytes), np.uint8))
        whole[_slices(piece.box)] = read(memory)
        checkpoint.dtypes[piece.name] = piece.dtype.name
    for alias in described.aliases:
        checkpoint.tied[alias.name] = alias.target
    checkpoint.objects |= {name: _text(value, name) for name, value in described.objects.items()}
    checkpoint.per_rank.append({name: _text(value, name) for name, value in described.per_rank.items()})
    return checkpoint


def _slices(box: object) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))  # type: ignore[attr-defined]


def _text(value: object, name: str) -> str:
    return json.dumps(objects.encode(value, name), allow_nan=False)


def _values(texts: Mapping[str, str]) -> dict[str, object]:
    return {name: objects.decode(json.loads(text), name) for name, text in texts.items()}


def stored(checkpoint: Checkpoint, *, rank: int = 0, rename: Callable[[str], str] = lambda name: name) -> StoredState:
    tensors = {}
    for name in [*checkpoint.tensors, *checkpoint.tied]:
        own = checkpoint.tied.get(name, name)
        tensors[rename(name)] = TensorSpec(DTYPES[checkpoint.dtypes[own]], checkpoint.tensors[own].shape[:-1])
    tied = {rename(name): rename(target) for name, target in checkpoint.tied.items()}
    per_rank = _values(checkpoint.per_rank[rank % len(checkpoint.per_rank)])
    return StoredState(tensors, _values(checkpoint.objects), per_rank, rename, tied)


def fill(checkpoint: Checkpoint, restoration: Restoration, *, rename: Callable[[str], str] = lambda name: name) -> None:
    """Put the bytes where they are wanted."""
    source = {rename(name): tensor for name, tensor in checkpoint.tensors.items()}
    source |= {rename(name): checkpoint.tensors[target] for name, target in checkpoint.tied.items()}
    for piece, memory in zip(restoration.pieces, memory_at(restoration.pieces, restoration.places), strict=True):
        write(memory, source[piece.name][_slices(piece.box)])


def load(
    checkpoint: Checkpoint,
    state: Mapping[str, object],
    *,
    rank: int = 0,
    rename: Callable[[str], str] = lambda name: name,
) -> Restoration:
    """Load strictly: every difference fails, of objects and of tensors."""
    known = stored(checkpoint, rank=rank, rename=rename)
    restoration = prepare(state, known, rank=rank)
    assert restoration.differences == ()
    for piece in restoration.pieces:
        assert known.tensors[piece.name] == TensorSpec(piece.dtype, piece.shape), piece.name
    expected = {piece.name for piece in restoration.pieces} | {alias.name for alias in restoration.aliases}
    sections = tuple(f"{name}{mark}" for name in restoration.sections for mark in (".", "@"))
    offered = {name for name in known.tensors if name in restoration.sections or name.startswith(sections)}
    mine = f"@{rank % max(1, len(checkpoint.per_rank))}"
    offered = {name for name in offered if "@" not in (first := name.partition(".")[0]) or first.endswith(mine)}
    assert expected == offered, expected ^ offered
    fill(checkpoint, restoration, rename=rename)
    restoration.finish()
    return restoration


def fingerprint(*values: object) -> str:
    """A hash over everything that can be reached from `values`: identities of objects, bytes of tensors."""
    digest = hashlib.sha256()
    seen: dict[int, int] = {}
    for value in values:
        _feed(value, digest, seen)
    return digest.hexdigest()


def _feed(value: object, digest: object, seen: dict[int, int]) -> None:
    feed = digest.update  # type: ignore[attr-defined]
    if isinstance(value, (type(None), bool, int, float, complex, str, bytes, type, np.generic)):
        feed(repr(value).encode("utf-8", "surrogatepass"))
        return
    if id(value) in seen:
        feed(f"again {seen[id(value)]}".encode())
        return
    seen[id(value)] = len(seen)
    feed(f"{type(value).__qualname__} {id(value)}".encode())
    if isinstance(value, torch.Generator):
        _feed(value.get_state().numpy().tobytes(), digest, seen)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        feed(
            f"{value.dtype} {tuple(value.shape)} {value.data_ptr() if isinstance(value, torch.Tensor) else 0}".encode()
        )
        feed(raw_bytes(value).tobytes())
        if isinstance(value, torch.Tensor):
            feed(f"{value.data_ptr()} {value._version} {value.requires_grad}".encode())
            _feed(value.grad if value.is_leaf else None, digest, seen)
    elif isinstance(value, (np.random.Generator, np.random.RandomState)):
        _feed(repr(value.__getstate__()), digest, seen)
    elif isinstance(value, random.Random):
        _feed(value.getstate(), digest, seen)
    else:
        if isinstance(value, dict):
            for key, item in value.items():
                _feed(key, digest, seen)
                _feed(item, digest, seen)
        elif isinstance(value, (list, tuple, set, frozenset)) or hasattr(value, "maxlen"):
            for item in value:  # type: ignore[attr-defined]
                _feed(item, digest, seen)
        _feed(getattr(value, "__dict__", None), digest, seen)


def process_generators() -> str:
    """A hash over the global generators."""
    words = np.random.get_state(legacy=False)
    state = random.getstate(), words["state"]["key"].tobytes(), words["state"]["pos"], words["gauss"]
    return hashlib.sha256(repr(state).encode() + torch.get_rng_state().numpy().tobytes()).hexdigest()
