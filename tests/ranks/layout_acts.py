"""What ranks do in the campaign of layouts: many jobs of any size, one after the other, in the same processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import flowstone as fs
import layouts
from flowstone.plan.assign_writers import assign_writers
from flowstone.torch.shards import boxes_of, runs_of
from layouts import Case, Layout, Lies, Mesh, Tensor, inside

POISON = 0xA5


class Boxes:
    """Any boxes of any tensors, each an array; a rank that holds nothing of a tensor holds an empty box of it."""

    def __init__(self) -> None:
        self.held: list[tuple[Tensor, fs.Box, np.ndarray]] = []


@fs.register_provider(Boxes)
class BoxesProvider(fs.Provider[Boxes]):
    def describe(self, value: Boxes) -> Sequence[fs.Part]:
        return [fs.Part(tensor.name, tensor.dtype.name, tensor.shape, box) for tensor, box, _ in value.held]

    def chunks(self, value: Boxes) -> Iterable[object]:
        return [array for _, _, array in value.held]

    def restore(self, value: Boxes, stored: Mapping[str, object]) -> None:
        assert not stored


def play(rank: int, path: str, seeds: list[int], ranks_max: int) -> None:
    """Save each case as its source lies, and load it as its target does; each time as a job of just so many ranks.

    In cases of an odd number replicas are cut for a few bytes.
    """
    cut = partial(assign_writers, worth_bytes=1, block_bytes_min=100)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
    dist.destroy_process_group()
    for seed in seeds:
        case = layouts.make(seed, ranks_max)
        where = f"{path}/{seed}"
        try:
            if rank < case.source.size:
                _as_job(store, f"{seed}/save", rank, case.source.size)
                with mock.patch("flowstone.coordination.rank_zero.assign_writers", cut if seed % 2 else assign_writers):
                    save(case, rank, where)
                dist.destroy_process_group()
                store.set(f"{seed}/saved/{rank}", b"")
            if rank < case.target.size:
                store.wait([f"{seed}/saved/{index}" for index in range(case.source.size)])
                _as_job(store, f"{seed}/load", rank, case.target.size)
                load(case, rank, where)
                dist.destroy_process_group()
        except Exception as error:
            raise AssertionError(f"{case}\nrepeat with LAYOUT={seed}") from error


def _as_job(store: dist.Store, name: str, rank: int, size: int) -> None:
    own = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=60))


def save(case: Case, rank: int, path: str) -> None:
    """Twice: by a plan that is new, and by the one that is known then."""
    state = state_of(case, case.source, rank, case.values())
    with fs.Checkpointer(path, budget_bytes=32 << 20, deadline_s=60.0) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).committed.result(60)


def load(case: Case, rank: int, path: str) -> None:
    nothing = {name: np.full_like(value, POISON) for name, value in case.values().items()}
    state = state_of(case, case.target, rank, nothing)
    with fs.Checkpointer(path, budget_bytes=32 << 20, deadline_s=60.0) as checkpointer:
        assert checkpointer.load(state).step == 2
    expected = contents(state_of(case, case.target, rank, case.values()))
    actual = contents(state)
    wrong = [name for name in expected if actual[name] != expected[name]]
    assert not wrong, f"{wrong} on rank {rank}"


def state_of(case: Case, layout: Layout, rank: int, values: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Tensors that lie on a mesh as DTensors, those of one box on each rank as shards, what lies otherwise as boxes."""
    tensors: dict[str, object] = {}
    boxes = Boxes()
    for number, (tensor, lies) in enumerate(zip(case.tensors, layout.lies, strict=True)):
        whole = values[tensor.name]
        if not all(_has_a_name(of.lies[number]) for of in (case.source, case.target)):
            for box in lies.boxes[rank] or (_nothing(tensor),):
                boxes.held.append((tensor, box, _elements(tensor, whole[inside(box)])))
        elif lies.mesh is not None:
            tensors[tensor.name] = _dtensor(tensor, lies.mesh, rank, whole)
        else:
            box = lies.boxes[rank][0] if lies.boxes[rank] else _nothing(tensor)
            tensors[tensor.name] = fs.Shard(_tensor(tensor, whole[inside(box)]), tensor.shape, box.offset)
    return {"tensors": tensors, "boxes": boxes}


def contents(state: dict[str, object]) -> dict[str, bytes]:
    """Every byte that this rank holds."""
    tensors, boxes = state["tensors"], state["boxes"]
    assert isinstance(tensors, dict)
    assert isinstance(boxes, Boxes)
    contents = {f"{item.name} {box}": array.tobytes() for item, box, array in boxes.held}
    for name, value in tensors.items():
        local = value.to_local() if isinstance(value, DTensor) else value.tensor
        contents[name] = local.contiguous().flatten().view(torch.uint8).numpy().tobytes() if local.numel() else b""
    return contents


def _has_a_name(lies: Lies) -> bool:
    """Whether it can be told without a provider."""
    return lies.mesh is not None or max(map(len, lies.boxes)) <= 1


def _nothing(tensor: Tensor) -> fs.Box:
    return fs.Box((0,) * len(tensor.shape), (0,) * len(tensor.shape))


def _elements(tensor: Tensor, raw: np.ndarray) -> np.ndarray:
    """Bytes as elements of the tensor's dtype."""
    if not raw.size:
        return np.empty(raw.shape[:-1], tensor.dtype.name)
    return np.ascontiguousarray(raw).view(tensor.dtype.name)[..., 0].copy()


def _tensor(tensor: Tensor, raw: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(_elements(tensor, raw))


def _dtensor(tensor: Tensor, mesh: Mesh, rank: int, whole: np.ndarray) -> DTensor:
    """What a rank holds of a tensor on a mesh, without a word to the others."""
    splits = mesh.splits(rank, len(tensor.shape))
    if splits is None:
        raw = whole[tuple(slice(0, 0) for _ in tensor.shape)] if tensor.shape else whole[None][:0]
    else:
        held = [sum(b - a for a, b in runs_of(n, of)) for n, of in zip(tensor.shape, splits, strict=True)]
        raw = np.full((*held, whole.shape[-1]), POISON, np.uint8)
        for box, within in boxes_of(tensor.shape, splits):
            raw[inside(within)] = whole[inside(box)]
    devices = DeviceMesh("cpu", torch.tensor(mesh.ranks).view(mesh.shape), _init_backend=False)
    placements: list[Placement] = [
        Replicate() if placed.dim is None
        else Shard(placed.dim) if placed.factor == 1 else _StridedShard(placed.dim, split_factor=placed.factor)
        for placed in mesh.placements
    ]
    empty = torch.empty(tensor.shape, device="meta")
    return DTensor.from_local(
        _tensor(tensor, raw), devices, placements, run_check=False, shape=empty.shape, stride=empty.stride()
    )
