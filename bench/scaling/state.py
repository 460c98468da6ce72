"""The part of a Llama-3's training state on each of thousands of simulated ranks, without its memory.

The state is described on meta tensors: bf16 parameters, fp32 master, exp_avg, exp_avg_sq and step. A layout determines
how a parameter and its optimizer state are divided on a mesh of ranks. Ranks are numbered with tensor parallelism
innermost, then data, then pipeline (Megatron's order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone.table.dtype import DTYPES, DType
from flowstone.table.pieces import Alias, Layout, Pieces, TensorColumns

SLOTS = ("master", "exp_avg", "exp_avg_sq")
RANKS_PER_NODE = 8
Cut = Literal["rows", "columns", None]  # by tensor parallelism
Numbers = tuple[int, ...]
Region = tuple[Numbers, Numbers]  # offset and shape, in elements


@dataclass(frozen=True, slots=True)
class Model:
    """A Llama-3 by its published sizes; `experts`: that many instead of one MLP, each a sixteenth as wide."""

    title: str
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int = 128_256
    key_value: int = 1024  # 8 heads of 128
    experts: int = 0

    def parameters(self) -> Iterator[tuple[str, torch.Tensor, Cut]]:
        """Names as transformers gives them, meta tensors, and how tensor parallelism cuts each."""
        hidden, wide = self.hidden, self.intermediate

        def meta(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="meta")

        yield "model.embed_tokens.weight", meta(self.vocabulary, hidden), "rows"
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.self_attn.q_proj.weight", meta(hidden, hidden), "rows"
            yield f"{prefix}.self_attn.k_proj.weight", meta(self.key_value, hidden), "rows"
            yield f"{prefix}.self_attn.v_proj.weight", meta(self.key_value, hidden), "rows"
            yield f"{prefix}.self_attn.o_proj.weight", meta(hidden, hidden), "columns"
            for name in [f"experts.{e}." for e in range(self.experts)] or [""]:
                inner = wide // 16 if self.experts else wide
                yield f"{prefix}.mlp.{name}gate_proj.weight", meta(inner, hidden), "rows"
                yield f"{prefix}.mlp.{name}up_proj.weight", meta(inner, hidden), "rows"
                yield f"{prefix}.mlp.{name}down_proj.weight", meta(hidden, inner), "columns"
            yield f"{prefix}.input_layernorm.weight", meta(hidden), None
            yield f"{prefix}.post_attention_layernorm.weight", meta(hidden), None
        yield "model.norm.weight", meta(hidden), None
        yield "lm_head.weight", meta(self.vocabulary, hidden), "rows"


MODELS = {
    "70b": Model("Llama-3 70B", 8192, 28_672, 80),
    "405b": Model("Llama-3 405B", 16_384, 53_248, 126),
    "moe": Model("a made-up mixture of experts (64 in each layer)", 8192, 28_672, 40, experts=64),
    "tiny": Model("a toy", 64, 192, 3, vocabulary=320, key_value=16),
    "tiny-moe": Model("a toy of experts", 64, 256, 2, vocabulary=320, key_value=16, experts=8),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the state, of the parameter of that name. `is_slot`: the optimizer owns it."""

    name: str
    parameter: str
    dtype: DType
    shape: Numbers
    cut: Cut
    is_slot: bool


def tensors(model: Model) -> list[Tensor]:
    """The full state, parameters first."""
    tensors, slots = [], []
    for name, meta, cut in model.parameters():
        shape = tuple(meta.shape)
        tensors.append(Tensor(f"model.{name}", name, DTYPES["bfloat16"], shape, cut, False))
        path = f"optimizer.state.model.{name}"
        slots += [Tensor(f"{path}.{slot}", name, DTYPES["float32"], shape, cut, True) for slot in SLOTS]
        slots.append(Tensor(f"{path}.step", name, DTYPES["float32"], (), None, True))
    return tensors + slots


@dataclass(frozen=True, slots=True)
class Mesh:
    """tensor x data x pipeline = ranks. `copies`: the number of data-parallel ranks with the same shards."""

    tensor: int
    data: int
    pipeline: int
    copies: int = 1

    def place(self, rank: int) -> tuple[int, int, int]:
        """The rank's tensor, data and pipeline coordinates."""
        return rank % self.tensor, rank // self.tensor % self.data, rank // (self.tensor * self.data)


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How a job lays out its state. `parameters`, `slots`: whether the data-parallel ranks shard them."""

    title: str
    mesh: Callable[[int], Mesh]
    parameters: bool
    slots: bool
    experts: bool = False


def _deep(ranks: int) -> Mesh:
    tensor = min(8, ranks)
    pipeline = min(16, max(1, ranks // tensor // 4))
    return Mesh(tensor, ranks // tensor // pipeline, pipeline)


PARALLELISMS = {
    "fsdp": Parallelism("FSDP over all", lambda ranks: Mesh(1, ranks, 1), True, True),
    "hsdp": Parallelism("HSDP, 4 copies", lambda ranks: Mesh(1, ranks, 1, 4), True, True),
    "tp-pp-fsdp": Parallelism("TP x PP x FSDP", _deep, True, True),
    "tp-pp-zero": Parallelism("TP x PP x ZeRO-1", _deep, False, True),
    "tp-pp-ddp": Parallelism("TP x PP x DDP", _deep, False, False),
    "ep": Parallelism("expert parallelism of 64, rest FSDP", lambda ranks: Mesh(1, ranks, 1), True, True, True),
}


class Job:
    """The pieces of a job's ranks, as the columns of their messages; most ranks share them."""

    def __init__(self, model: Model, how: Parallelism, ranks: int) -> None:
        self.ranks, self._model, self._how = ranks, model, how
        self.mesh = how.mesh(ranks)
        self._all = tensors(model)
        self._stages = _stages(model, self.mesh.pipeline)
        self._forms: dict[tuple[object, ...], _Form] = {}

    @property
    def nodes(self) -> list[int]:
        return [rank // RANKS_PER_NODE for rank in range(self.ranks)]

    @cached_property
    def state_bytes(self) -> int:
        return sum(int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.item_bytes for tensor in self._all)

    def held(self, rank: int) -> Pieces:
        """The pieces of a rank: each distinct box of each shape once, as `Pieces.compact` makes them."""
        tensor, data, stage = self.mesh.place(rank)
        form = self._form(stage, self._owner(rank))
        regions = [self._region(example, tensor, data) for example in form.examples]
        key = stage, self._owner(rank), *(_how(region, of) for region, of in zip(regions, form.examples, strict=True))
        if key not in self._forms:
            self._forms[key] = _Form.of(form, regions)
        return self._forms[key].held(regions)

    def _form(self, stage: int, owner: int) -> _Form:
        """The tensors of a stage and of the experts' owner, before it is known which are empty."""
        if (stage, owner) not in self._forms:
            mine = [tensor for tensor in self._all if self._is_of(tensor, stage, owner)]
            self._forms[stage, owner] = _Form(mine)
        return self._forms[stage, owner]

    def _owner(self, rank: int) -> int:
        return rank % self._expert_groups if self._how.experts else 0

    @property
    def _expert_groups(self) -> int:
        return min(self._model.experts, self.ranks)

    def _is_of(self, tensor: Tensor, stage: int, owner: int) -> bool:
        if self._stages[tensor.parameter] != stage:
            return False
        if not self._how.experts or ".experts." not in tensor.name:
            return True
        number = int(tensor.name.partition(".experts.")[2].partition(".")[0])
        return number % self._expert_groups == owner

    def _region(self, value: Tensor, tensor: int, data: int) -> Region:
        """The part of a tensor on a rank at these coordinates."""
        offset, shape = [0] * len(value.shape), list(value.shape)
        if not shape:
            return (), ()
        if value.cut is not None and self.mesh.tensor > 1:
            dim = 0 if value.cut == "rows" else 1
            offset[dim], shape[dim] = _chunk(shape[dim], self.mesh.tensor, tensor)
        is_expert = self._how.experts and ".experts." in value.name
        if (self._how.slots if value.is_slot else self._how.parameters) and not is_expert:
            shards = self.mesh.data // min(self.mesh.copies, self.mesh.data)
            begin, shape[0] = _chunk(shape[0], shards, data % shards)
            offset[0] += begin
        return tuple(offset), tuple(shape)


def _chunk(length: int, parts: int, number: int) -> tuple[int, int]:
    """The begin and length of the part, as torch.chunk cuts; length 0 if there are fewer parts."""
    size = -(-length // parts)
    begin = min(number * size, length)
    return begin, min(size, length - begin)


def _stages(model: Model, stages: int) -> dict[str, int]:
    """The pipeline stage of each parameter: layers in even runs, the ends with what belongs to them."""
    numbers = {}
    for name, _, _ in model.parameters():
        if name.startswith("model.layers."):
            numbers[name] = int(name.split(".")[2]) * stages // model.layers
        else:
            numbers[name] = 0 if "embed" in name else stages - 1
    return numbers


def _how(region: Region, tensor: Tensor) -> str:
    if region[1] == tensor.shape:
        return "whole"
    return "empty" if 0 in region[1] else "part"


class _Form:
    """Tensors of which ranks hold parts, and the columns that all these ranks have in common.

    examples  a tensor of each kind: of one shape, cut one way
    """

    def __init__(self, mine: list[Tensor]) -> None:
        kinds: dict[tuple[object, ...], int] = {}
        self.mine = mine
        self.kind = [kinds.setdefault((t.shape, t.cut, t.is_slot, ".experts." in t.name), len(kinds)) for t in mine]
        first = {kind: index for index, kind in reversed(list(enumerate(self.kind)))}
        self.examples = [mine[first[kind]] for kind in range(len(kinds))]

    @classmethod
    def of(cls, form: _Form, regions: list[Region]) -> _Form:
        """Without the tensors of which the rank holds nothing."""
        made = cls.__new__(cls)
        how = [_how(region, example) for region, example in zip(regions, form.examples, strict=True)]
        pairs = [(t, kind) for t, kind in zip(form.mine, form.kind, strict=True) if how[kind] != "empty"]
        made.mine, made.kind, made.examples = [t for t, _ in pairs], [kind for _, kind in pairs], form.examples
        made._columns(how)
        return made

    def _columns(self, how: list[str]) -> None:
        mine = self.mine
        self._names = TensorColumns(
            tuple(t.name for t in mine), tuple(t.dtype for t in mine), tuple(t.shape for t in mine)
        )
        self._parts: NDArray[np.int64] = np.array(
            [index for index, kind in enumerate(self.kind) if how[kind] == "part"], np.int64
        )
        self._kinds = [self.kind[part] for part in self._parts.tolist()]
        self._compact: dict[tuple[int, ...], NDArray[np.int64]] = {}

    def held(self, regions: list[Region]) -> Pieces:
        """The columns of the rank whose kinds of tensors have these regions."""
        numbers: dict[tuple[Numbers, Region], int] = {}
        of_kind = {
            kind: numbers.setdefault((self.examples[kind].shape, regions[kind]), len(numbers))
            for kind in dict.fromkeys(self._kinds)
        }
        key = tuple(of_kind.values())
        if key not in self._compact:
            self._compact[key] = np.array([of_kind[kind] for kind in self._kinds], np.int64)
        boxes = [number for _, region in numbers for half in region for number in half]
        return Pieces(self._names, self._parts, np.array(boxes, np.int64), self._compact[key])


def pieces_of(held: Pieces) -> Pieces:
    """The same with a box for each part, like a rank's own pieces."""
    return Pieces(held.tensors, held.parts, held.part_numbers()[0])


def layout_of(held: Pieces) -> Layout:
    aliases: tuple[Alias, ...] = ()
    return Layout(pieces_of(held), aliases, (True,) * len(held.names))


class Sizes:
    """Bytes of every piece that a rank holds, by columns."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = {}

    def __call__(self, held: Pieces) -> NDArray[np.int64]:
        names, kinds = held.tensors, held.kinds
        assert kinds is not None
        key = id(names), id(kinds)
        if key not in self._known:
            items = np.array([dtype.item_bytes for dtype in names.dtypes], np.int64)
            whole = np.array([np.prod(shape, dtype=np.int64) for shape in names.shapes], np.int64)
            ndim = dict(zip(kinds.tolist(), (len(names.shapes[part]) for part in held.parts.tolist()), strict=True))
            sides = np.full((len(ndim), max(ndim.values(), default=0)), -1)  # their place in the boxes; -1: the end
            offset = 0
            for kind in range(len(ndim)):
                n = ndim[kind]
                sides[kind, :n] = np.arange(offset + n, offset + 2 * n)
                offset += 2 * n
            self._known[key] = items, whole, sides
        items, whole, sides = self._known[key]
        values = whole.copy()
        values[held.parts] = np.append(held.boxes, 1)[sides].prod(axis=1)[kinds]
        return values * items
