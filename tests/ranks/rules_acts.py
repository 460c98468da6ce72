"""Functions for ranks with a checkpoint whose tensors have other layouts than theirs."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from acts import local, opened
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flowstone as fs

LAYERS, EXPERTS, WORDS, PADDED, WIDTH = 2, 4, 50, 56, 24
RULES = fs.RuleSet((
    fs.Fuse(tuple(f"{part}{{n}}" for part in "qkv"), "qkv{n}", 0, (4, 2, 2), 2), fs.Transpose("out{n}"),
    fs.Stack("up{n}_{e}", "ups{n}"), fs.Stack("norm{n}", "norms", 1), fs.Pad("embed", WORDS, PADDED),
    fs.Stack("large{e}", "larges"),
), complete=True)
Wholes = dict[str, torch.Tensor]


def apart(shift: int = 0) -> Wholes:
    """All tensors as one program has them; every element another number."""
    sides: dict[str, tuple[int, ...]] = {"embed": (WORDS, WIDTH)}
    for n in range(LAYERS):
        sides |= {f"q{n}": (32, WIDTH), f"k{n}": (16, WIDTH), f"v{n}": (16, WIDTH), f"out{n}": (WIDTH, 32)}
        sides |= {f"norm{n}": (WIDTH,)} | {f"up{n}_{e}": (12, WIDTH) for e in range(EXPERTS)}
    sides |= {f"large{e}": (1024, 1024) for e in range(EXPERTS)}
    return {
        name: torch.arange(math.prod(side), dtype=torch.float32).view(side) + index + shift
        for index, (name, side) in enumerate(sides.items())
    }


def joined(shift: int = 0) -> Wholes:
    """The same as the other program has them."""
    own = apart(shift)
    result = {"embed": torch.cat([own["embed"], torch.zeros(PADDED - WORDS, WIDTH)])}
    for n in range(LAYERS):
        groups = [own[f"{part}{n}"].view(2, -1, WIDTH) for part in "qkv"]
        result |= {f"qkv{n}": torch.cat(groups, 1).view(-1, WIDTH), f"out{n}": own[f"out{n}"].T.contiguous()}
        result[f"ups{n}"] = torch.stack([own[f"up{n}_{e}"] for e in range(EXPERTS)])
    result["norms"] = torch.stack([own[f"norm{n}"] for n in range(LAYERS)], 1)
    return result | {"larges": torch.stack([own[f"large{e}"] for e in range(EXPERTS)])}


class Weights(nn.Module):
    """Tensors as parameters: sharded by "rows" or "columns", or by FSDP2 ("fsdp")."""

    def __init__(self, wholes: Wholes, how: str) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
        for name, whole in wholes.items():
            value = whole.clone()
            if mesh is not None and how != "fsdp":
                dim = 0 if how == "rows" else value.dim() - 1
                value = distribute_tensor(value, mesh, [Shard(dim)])
            self.register_parameter(name, nn.Parameter(value))
        if mesh is not None and how == "fsdp":
            fully_shard(self, mesh=mesh)


def state_of(wholes: Wholes, how: str) -> dict[str, Any]:
    model = Weights(wholes, how)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def put(state: dict[str, Any], program: Any) -> None:
    for tensor, whole in pairs(state, program):
        mine = distribute_tensor(whole, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else whole
        tensor.copy_(mine)


def pairs(state: dict[str, Any], program: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every tensor, and what it is to hold: parameters, then both moments."""
    pairs = []
    for number, shift in enumerate((0, 7, 13)):
        wholes = program(shift)
        for name, parameter in state["model"].named_parameters():
            slot = (None, "exp_avg", "exp_avg_sq")[number]
            tensor = parameter.data if slot is None else state["optimizer"].state[parameter][slot]
            pairs.append((tensor, wholes[name]))
    return pairs


PROGRAMS = {"apart": apart, "joined": joined}


def save(rank: int, path: str, which: str, how: str, step: int) -> None:
    program = PROGRAMS[which]
    state = state_of(program(), how)
    with torch.no_grad():
        put(state, program)
    with opened(path) as checkpointer:
        checkpointer.save(step, state).committed.result(60)


def load(rank: int, path: str, which: str, how: str, step: int) -> list[int]:
    """Load by the rules, and find every element where it belongs. Returns the bytes that were read, and shared."""
    program = PROGRAMS[which]
    state = state_of({name: torch.full_like(whole, -3) for name, whole in program().items()}, how)
    with opened(path) as checkpointer:
        report = checkpointer.load(state, step=step, rules=RULES if which == "joined" else RULES.inverse)
    for index, (tensor, whole) in enumerate(pairs(state, program)):
        mine = distribute_tensor(whole, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else whole
        assert torch.equal(local(tensor), local(mine)), (which, index)
    assert all(state["optimizer"].state[parameter]["step"] == 1 for parameter in state["model"].parameters())
    return [report.bytes, report.shared_bytes]


def refused(rank: int, path: str) -> str:
    """Why a load is refused whose rules do not fit on one rank: the same on all."""
    wholes = joined()
    if rank == 1:
        wholes["norms"] = torch.zeros(WIDTH, LAYERS + 1)
    state = {"model": Weights(wholes, "rows")}
    with opened(path) as checkpointer:
        try:
            checkpointer.load(state, step=1, rules=RULES)
        except fs.FlowstoneError as error:
            return f"{type(error).__name__} {error}"
    return "loaded"
