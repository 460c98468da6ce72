"""The states that bench.codecs encodes: that of a GPT in training, and synthetic states of any size like it."""

from __future__ import annotations

import numpy as np
import torch

from flowstone import _native
from flowstone_demo.sizes import Sizes
from flowstone_demo.train import Training

CHUNK = _native.CHUNK_BYTES
SIZES = Sizes(width=384, depth=6, heads=6, length=64, batch=8, corpus_bytes=1 << 20, steps=1000)

Chunks = list[np.ndarray]


def after(steps: int) -> Training:
    """A training after that many steps."""
    run = Training(SIZES, seed=1)
    for _ in range(steps):
        run.train_step()
    return run


def trained(steps: int) -> dict[str, tuple[Chunks, int]]:
    """Full chunks of each part of a training's state, and the length of their numbers in bytes."""
    run = after(steps)
    weights = [parameter.detach() for parameter in run.model.parameters()]
    states = list(run.optimizer.state.values())
    parts = {
        "weights": (weights, 4), "exp_avg": ([state["exp_avg"] for state in states], 4),
        "exp_avg_sq": ([state["exp_avg_sq"] for state in states], 4),
        "weights, bf16": ([weight.bfloat16().view(torch.int16) for weight in weights], 2),
    }
    chunked = {}
    for name, (tensors, width) in parts.items():
        data = torch.cat([tensor.flatten() for tensor in tensors]).numpy().view(np.uint8)
        chunked[name] = ([data[offset : offset + CHUNK] for offset in range(0, len(data) - CHUNK + 1, CHUNK)], width)
    return chunked


def mixed(run: Training) -> dict[str, torch.Tensor]:
    """The state of a training in mixed precision: fp32 weights, their bf16 roundings, two moments."""
    tensors: dict[str, torch.Tensor] = {}
    for index, (parameter, state) in enumerate(run.optimizer.state.items()):
        weight = parameter.detach()  # type: ignore[attr-defined]
        tensors |= {f"{index}.master": weight, f"{index}.weight": weight.bfloat16()}
        tensors |= {f"{index}.{slot}": state[slot] for slot in ("exp_avg", "exp_avg_sq")}
    return tensors


def mixed_of(total_bytes: int) -> dict[str, torch.Tensor]:
    """Like `mixed`, of any size, with normally distributed numbers instead of trained ones."""
    torch.manual_seed(0)
    elements, layers = total_bytes // 14, max(1, total_bytes // 14 // 4_000_000)
    size = elements // layers
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        master = torch.randn(size) * 0.02
        tensors[f"{layer}.master"], tensors[f"{layer}.weight"] = master, master.bfloat16()
        tensors[f"{layer}.exp_avg"] = torch.randn(size) * 1e-4 * torch.rand(size)
        tensors[f"{layer}.exp_avg_sq"] = (torch.randn(size) * 1e-5) ** 2
    return tensors


def change(tensors: dict[str, torch.Tensor]) -> None:
    """Change something in each chunk of a `mixed_of`, and round the master copy to the working weights again.

    The changes are large enough to change the working weights as well.
    """
    for name, tensor in tensors.items():
        if not name.endswith(".weight"):
            tensor.view(torch.int32)[::2048] ^= 1 << 16
    for name, tensor in tensors.items():
        if name.endswith(".weight"):
            tensor.copy_(tensors[name.replace(".weight", ".master")])
