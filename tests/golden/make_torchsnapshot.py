"""Takes the golden snapshots, once, in tests/: `python -m golden.make_torchsnapshot`, with torchsnapshot 0.1.0."""

from __future__ import annotations

import os
import socket
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).resolve().parent
ALONE, TOGETHER = GOLDEN / "torchsnapshot", GOLDEN / "torchsnapshot-ranks"
RANKS = 3


def numbers(*shape: int) -> torch.Tensor:
    """Numbers that differ."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 8


def model() -> torch.nn.Module:
    made = torch.nn.Linear(20, 7)
    made.load_state_dict({"weight": numbers(7, 20), "bias": -numbers(7)})
    return made


def optimizer(of: torch.nn.Module) -> torch.optim.Optimizer:
    """One that has stepped, and has numbers that do not depend on the version of torch."""
    made = torch.optim.AdamW(of.parameters(), lr=0.125)
    of(torch.ones(2, 20)).sum().backward()
    made.step()
    for state in made.state.values():
        state["exp_avg"].copy_(numbers(*state["exp_avg"].shape) + 1)
        state["exp_avg_sq"].copy_(numbers(*state["exp_avg"].shape) + 2)
    of.load_state_dict(model().state_dict())
    return made


def values() -> dict[str, Any]:
    """Whatever TorchSnapshot has a kind of entry for."""
    return {
        "step": 3, "name": "a/b%2F", "rate": 0.1, "flag": True, "raw": b"\0hi", "nothing": None,
        "pair": (1, numbers(2)), "half": numbers(4).bfloat16(), "scalar": torch.tensor(2.5),
        "complex": torch.complex(numbers(3, 2), -numbers(3, 2)), "long": numbers(60, 5),
        "ordered": OrderedDict(x=numbers(3), y=[numbers(2, 2), {1: 2, "k": [5]}]), "x/y%z": torch.arange(5),
        "empty": [],
    }


def take_alone(path: Path) -> None:
    """One rank's, in chunks of 400 bytes."""
    from torchsnapshot import RNGState, Snapshot, StateDict

    os.environ["TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE"] = "400"
    net = model()
    quantised = torch.quantize_per_tensor(numbers(3), 0.1, 0, torch.qint8)
    Snapshot.take(str(path), {
        "model": net, "optim": optimizer(net), "extra/1": StateDict(**values()), "rng": RNGState(),
        "odd": StateDict(quantised=quantised, weight=numbers(2)),
    })


def take_together(path: Path) -> None:
    """That of three ranks: sharded, replicated, and each its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_take_rank, (port, str(path)), RANKS)


def _take_rank(rank: int, port: int, path: str) -> None:
    import torch.distributed as dist
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torchsnapshot import Snapshot, StateDict

    os.environ.update(
        TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE="400", TORCHSNAPSHOT_MAX_SHARD_SIZE_BYTES_OVERRIDE="200"
    )
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    placements = [f"rank:{rank}/cpu" for rank in range(RANKS)]
    parts = {}
    for name, dim in (("rows", 0), ("columns", 1)):
        made = sharded_tensor.zeros(ChunkShardingSpec(dim=dim, placements=placements), 32, 7)
        for shard in made.local_shards():
            begin, side = shard.metadata.shard_offsets[dim], shard.metadata.shard_sizes[dim]
            shard.tensor.copy_(numbers(32, 7).narrow(dim, begin, side))
        parts[name] = made
    Snapshot.take(
        path,
        {"model": StateDict(**parts, **model().state_dict()), "progress": StateDict(step=3, same=(1, 2), rank=rank),
         "mine": StateDict(noise=torch.full((3,), rank))} | ({"last": StateDict(one=1)} if rank == RANKS - 1 else {}),
        replicated=["model/*", "progress/step"],
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    for make, place in ((take_alone, ALONE), (take_together, TOGETHER)):
        make(place)
        sys.stdout.write(f"{place}\n")
