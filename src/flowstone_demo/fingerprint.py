"""Digests of a run's state in memory. They are computed without any code that saves or loads checkpoints."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator

import numpy as np
import torch

from flowstone_demo.train import Training

VALUES = "all other values"


def fingerprint(run: Training) -> tuple[str, int]:
    """Returns the SHA-256 of weights, moments, generators, loader, scheduler and losses, and the number of bytes of the
    tensors.
    """
    digest, total_bytes = hashlib.sha256(), 0
    for name, sha256, count in digests(run):
        digest.update(f"{name} {sha256}\n".encode())
        total_bytes += count
    return digest.hexdigest(), total_bytes


def digests(run: Training) -> Iterator[tuple[str, str, int]]:
    """Yields name, SHA-256 and length in bytes of every tensor, then of all other values together.

    Sharded tensors are gathered, so all ranks must call this. They get the same result.
    """
    for name, tensor in _tensors(run):
        memory = whole(tensor.detach()).contiguous().numpy()
        digest = hashlib.sha256(f"{memory.dtype} {memory.shape}\n".encode())
        digest.update(memory.reshape(-1).view(np.uint8).data)
        yield name, digest.hexdigest(), memory.nbytes
    digest = hashlib.sha256()
    for name, plain in _plain(run):
        digest.update(f"{name} {plain!r}\n".encode())  # the repr of a float is exact
    for loss in run.losses["train"]:
        digest.update(struct.pack("<d", loss))
    yield VALUES, digest.hexdigest(), 0


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor. If it is a DTensor, its parts are gathered from all ranks."""
    gather: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _tensors(run: Training) -> Iterator[tuple[str, torch.Tensor]]:
    yield from run.model.named_parameters()
    yield from run.model.named_buffers()
    for name, parameter in run.model.named_parameters():
        for slot, value in sorted(run.optimizer.state[parameter].items()):
            yield f"{name} {slot}", value
    yield "torch generator", torch.get_rng_state()
    generator = run.loader.state_dict()["generator"]
    assert isinstance(generator, torch.Tensor), "our own loader"
    yield "loader generator", generator


def _plain(run: Training) -> Iterator[tuple[str, object]]:
    yield "python generator", random.getstate()
    kind, words, *rest = np.random.get_state(legacy=True)
    yield "numpy generator", (kind, np.asarray(words).tolist(), rest)
    yield "loader", [(key, value) for key, value in run.loader.state_dict().items() if key != "generator"]
    yield "scheduler", [(k, v) for k, v in sorted(run.scheduler.state_dict().items()) if k != "lr_lambdas"]
    for group in run.optimizer.param_groups:
        yield "group", [(key, value) for key, value in sorted(group.items()) if key != "params"]
