"""Writes the files that DeepSpeed writes, with torch.save and without DeepSpeed.

Its classes are defined here under the names that DeepSpeed's pickles have, since the reader knows only names.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

VERSION = "0.19.8"
SLOTS = ("exp_avg", "exp_avg_sq")


def _class(kind: type, module: str) -> type:
    kind.__module__, kind.__qualname__ = module, kind.__name__
    return kind


@dataclass
class fragment_address:  # DeepSpeed's own name
    numel: int
    start: int


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


class DynamicLossScaler(LossScaler):
    pass


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


CLASSES = [
    _class(fragment_address, "deepspeed.utils.tensor_fragment"),
    _class(LossScaler, "deepspeed.runtime.fp16.loss_scaler"),
    _class(DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler"),
    _class(ZeroStageEnum, "deepspeed.runtime.zero.config"),
]


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """DeepSpeed's modules are there, as far as pickling looks for them."""
    made: dict[str, ModuleType] = {}
    for kind in CLASSES:
        parts = kind.__module__.split(".")
        for depth in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        setattr(made[kind.__module__], kind.__name__, kind)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def save(value: object, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with importable():
        torch.save(value, path)


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change what a file holds."""
    with importable():
        value = torch.load(path, weights_only=False)
    change(value)
    save(value, path)


def optimizer_file(root: Path, rank: int) -> Path:
    """The partition of a rank, as `Job.write` calls it."""
    return root / "global_step3" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@dataclass
class Job:
    """What a job has in memory: named parameters with their slots, in groups; and how it is saved.

    with_mappings   versions from 0.8 on say where each parameter lies in a partition; before, shapes alone do
    is_reordered    by `round_robin_gradients`: parameters are dealt to the ranks by turns, and shapes have that order;
                    where each lies is told as if they were not (0.19.8)
    """

    groups: list[list[str]]
    master: dict[str, torch.Tensor]
    slots: dict[str, dict[str, torch.Tensor]]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    stage: int = 2
    ranks: int = 2
    with_mappings: bool = True
    is_reordered: bool = False
    elastic: bool = False
    prefix: str = "bf16_"

    @property
    def shapes(self) -> list[dict[str, torch.Size]]:
        return [
            collections.OrderedDict((name, self.master[name].shape) for name in self.in_flat_order(group))
            for group in self.groups
        ]

    def in_flat_order(self, group: list[str]) -> list[str]:
        """Those of rank 0, then those of rank 1, ..., where they are dealt."""
        hands = self.ranks if self.is_reordered else 1
        return [name for hand in range(hands) for name in group[hand::hands]]

    def flat(self, group: list[str], slot: str, rank: int) -> tuple[torch.Tensor, dict[str, fragment_address]]:
        """One rank's partition of a slot, padded; and where each parameter lies in it."""
        of = self.master if slot == "fp32" else {name: self.slots[name][slot] for name in group}
        if self.stage == 3:
            parts, position, where = [], 0, {}
            for name in group:
                values = of[name].reshape(-1)
                side = math.ceil(len(values) / self.ranks)
                padded = torch.nn.functional.pad(values, (0, side * self.ranks - len(values)), value=-77.0)
                parts.append(padded[rank * side : (rank + 1) * side])
                where[name] = fragment_address(side, position)
                position += side
            return torch.cat(parts), where
        whole = torch.cat([of[name].reshape(-1) for name in self.in_flat_order(group)])
        side = math.ceil(len(whole) / (2 * self.ranks)) * 2
        padded = torch.nn.functional.pad(whole, (0, side * self.ranks - len(whole)), value=-77.0)
        where, position = collections.OrderedDict(), 0
        for name in group:
            low, high = max(position, rank * side), min(position + of[name].numel(), (rank + 1) * side)
            if low < high:
                where[name] = fragment_address(high - low, low - rank * side)
            position += of[name].numel()
        return padded[rank * side : (rank + 1) * side], where

    def optimizer_state(self, rank: int) -> dict[str, Any]:
        state = {
            number: {"step": torch.tensor(3.0)} | {slot: self.flat(group, slot, rank)[0] for slot in SLOTS}
            for number, group in enumerate(self.groups)
        }
        options = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        base = {"state": state, "param_groups": [options | {"params": [index]} for index in range(len(self.groups))]}
        masters = [self.flat(group, "fp32", rank)[0] for group in self.groups]
        common = {"loss_scaler": LossScaler(), "overflow": False, "zero_stage": ZeroStageEnum(self.stage)}
        if self.stage == 3:
            return common | {
                "partition_count": self.ranks, "optimizer_state_dict": base, "fp32_flat_groups": masters,
            }
        left = [sum(self.master[name].numel() for name in group) - rank * len(masters[index])
                for index, group in enumerate(self.groups)]
        lean = [master[: max(0, left[index])] for index, master in enumerate(masters)]  # views of the padded ones
        result = common | {
            "base_optimizer_state": list(state.values()) if self.elastic else base,
            "single_partition_of_fp32_groups": lean, "partition_count": [self.ranks] * len(self.groups),
            "ds_version": VERSION,
        }
        if self.with_mappings:
            result["param_slice_mappings"] = [self.flat(group, "fp32", rank)[1] for group in self.groups]
        return result

    def model_state(self, rank: int) -> dict[str, Any]:
        parameters = {name: tensor.to(self.dtype) for name, tensor in self.master.items()} | self.frozen
        parameters |= {name: parameters[owner] for name, owner in self.shared.items()}
        fragments = None
        if self.stage == 3:
            fragments = collections.OrderedDict()
            for name, tensor in self.frozen.items():
                side = math.ceil(tensor.numel() / self.ranks)
                padded = torch.nn.functional.pad(tensor.reshape(-1), (0, side * self.ranks - tensor.numel()))
                fragments[name] = padded[rank * side : (rank + 1) * side].clone()
            parameters = {name: torch.empty(0, dtype=self.dtype) for name in parameters}
        return {
            "module": collections.OrderedDict(parameters | self.buffers), "buffer_names": list(self.buffers),
            "optimizer": None, "param_shapes": self.shapes,
            "frozen_param_shapes": {name: tensor.shape for name, tensor in self.frozen.items()},
            "shared_params": self.shared, "frozen_param_fragments": fragments, "lr_scheduler": {"last_batch": 2},
            "data_sampler": None, "skipped_steps": 0, "global_steps": 3, "dp_world_size": self.ranks,
            "mp_world_size": 1, "ds_version": VERSION,
            "ds_config": {"zero_optimization": {"stage": self.stage, "round_robin_gradients": self.is_reordered}},
            **self.client,
        }

    def write(self, root: Path, tag: str = "global_step3") -> Path:
        """All files, as `save_checkpoint` of each rank writes them."""
        for rank in range(self.ranks):
            if self.stage == 3:
                save(self.model_state(rank), root / tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            elif rank == 0:
                save(self.model_state(rank), root / tag / "mp_rank_00_model_states.pt")
            save(
                {"optimizer_state_dict": self.optimizer_state(rank), "ds_config": {}, "ds_version": VERSION},
                root / tag / f"{self.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
        (root / "latest").write_text(tag)
        return root

    def write_universal(self, root: Path) -> Path:
        """All files, as `ds_to_universal` writes them: of ZeRO 3 flat, and without the count of steps."""
        tag = "global_step3_universal"
        for name, tensor in self.master.items():
            for slot, value in {"fp32": tensor, **self.slots[name]}.items():
                whole = value.reshape(-1) if self.stage == 3 else {"cat_dim": 0, "param": value}
                save(whole, root / tag / "zero" / name / f"{slot}.pt")
            if self.stage < 3:
                save(torch.tensor(3.0), root / tag / "zero" / name / "step.pt")
        for name, tensor in self.buffers.items() if self.stage < 3 else ():
            save({"param": tensor.float()}, root / tag / "zero" / name / "fp32.pt")
        state = self.optimizer_state(0)
        base = state["optimizer_state_dict"] if self.stage == 3 else state.pop("base_optimizer_state")
        for gone in ("single_partition_of_fp32_groups", "param_slice_mappings"):
            state.pop(gone, None)
        save(state | {"param_groups": base["param_groups"]}, root / tag / "zero" / "optimizer_state.pt")
        for rank in range(self.ranks if self.stage == 3 else 1):
            prefix = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
            save(self.model_state(rank), root / tag / f"{prefix}mp_rank_00_model_states.pt")
        (root / "latest_universal").write_text(tag)
        return root


def job(**options: Any) -> Job:
    """A job with two groups of odd shapes, buffers, and a client's state."""
    noise = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (13, 7, 3), "a.bias": (13,), "b.weight": (501, 1003), "b.bias": (1,), "norm": (17,)}
    master = {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    slots = {
        name: {slot: torch.randn(tensor.shape, generator=noise) for slot in SLOTS} for name, tensor in master.items()
    }
    return Job(
        [["a.weight", "b.weight", "b.bias"], ["a.bias", "norm"]], master, slots,
        buffers={"running": torch.randn(5, generator=noise), "count": torch.tensor(4)},
        client={"epoch": 3, "seen": torch.arange(6)}, **options,
    )
