"""The states that are saved and loaded.

"llama": names and shapes of a real Llama, scaled to the requested size. Weights in bf16, and for each of them a master
copy and two moments in fp32: 14 bytes a parameter. Proportions are those of Llama-2-7B (hidden 4096, MLP 2.69 times
that, vocabulary 7.8 times, a layer for each 128 of hidden size).

"small": 50,000 tensors of 4 KiB, where the work for each tensor counts, not the bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

BYTES_PER_PARAMETER = 2 + 3 * 4
SLOTS = ("master", "exp_avg", "exp_avg_sq")
HIDDEN_STEP = 64
SMALL_COUNT, SMALL_ITEMS = 50_000, 1024
PAGE_BYTES = 4096
BLOCK_ITEMS = 1 << 22  # of random values; every tensor takes its own part of it

Tensors = dict[str, torch.Tensor]
State = dict[str, object]  # nested dictionaries of tensors


class Layout(Protocol):
    """The layout of a state."""

    @property
    def state_bytes(self) -> int: ...

    def empty(self, phase: int | None, ranks: int = 1) -> State:
        """The state, its memory untouched; or one rank's part of it, an equal share of every tensor's rows."""


@dataclass(frozen=True, slots=True)
class Llama:
    """Sizes of a Llama."""

    hidden: int
    layers: int

    @property
    def intermediate(self) -> int:
        return self.hidden * 43 // 16 // 16 * 16

    @property
    def vocabulary(self) -> int:
        return self.hidden * 125 // 16

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in the order in which transformers' LlamaForCausalLM registers them."""
        hidden, wide, words = self.hidden, self.intermediate, self.vocabulary
        yield "model.embed_tokens.weight", (words, hidden)
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield f"{name}.self_attn.{part}.weight", (hidden, hidden)
            yield f"{name}.mlp.gate_proj.weight", (wide, hidden)
            yield f"{name}.mlp.up_proj.weight", (wide, hidden)
            yield f"{name}.mlp.down_proj.weight", (hidden, wide)
            yield f"{name}.input_layernorm.weight", (hidden,)
            yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (words, hidden)

    @property
    def state_bytes(self) -> int:
        return BYTES_PER_PARAMETER * sum(torch.Size(shape).numel() for _, shape in self.parameters())

    def empty(self, phase: int | None, ranks: int = 1) -> State:
        """Weights first, then each parameter's slots, as an optimizer makes them."""
        shapes = {name: part(shape, ranks) for name, shape in self.parameters()}
        model = {name: empty(shape, torch.bfloat16, phase) for name, shape in shapes.items()}
        slots = {name: {slot: empty(shape, torch.float32, phase) for slot in SLOTS} for name, shape in shapes.items()}
        return {"model": model, "optimizer": {"state": slots}}

    def __str__(self) -> str:
        tensors = (1 + len(SLOTS)) * sum(1 for _ in self.parameters())
        sizes = f"hidden size {self.hidden}, {self.layers} layers"
        return f"Llama-shaped state of {self.state_bytes / 1e9:.3f} GB in {tensors} tensors ({sizes})"


@dataclass(frozen=True, slots=True)
class Small:
    """Equal small tensors, each its own allocation."""

    count: int

    @property
    def state_bytes(self) -> int:
        return 4 * SMALL_ITEMS * self.count

    def empty(self, phase: int | None, ranks: int = 1) -> State:
        shape = part((SMALL_ITEMS,), ranks)
        return {"table": {f"{index:05d}": empty(shape, torch.float32, phase) for index in range(self.count)}}


def choose_layout(shape: str, state_bytes: int) -> Layout:
    """The layout of that shape nearest to `state_bytes`; "small" has at most 50,000 tensors."""
    if shape == "small":
        return Small(min(SMALL_COUNT, max(1, state_bytes // (4 * SMALL_ITEMS))))
    return choose_llama(state_bytes)


def choose_llama(state_bytes: int) -> Llama:
    """The Llama nearest to `state_bytes` whose proportions are nearest to the real one's."""
    hidden = HIDDEN_STEP
    while _proportioned(hidden + HIDDEN_STEP).state_bytes <= state_bytes:
        hidden += HIDDEN_STEP
    small, two = Llama(hidden, 1).state_bytes, Llama(hidden, 2).state_bytes
    return Llama(hidden, max(1, 1 + round((state_bytes - small) / (two - small))))


def _proportioned(hidden: int) -> Llama:
    return Llama(hidden, max(1, hidden // 128))


def part(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The part of a tensor on one of `ranks`; every size of ours is a multiple of 16."""
    rows, rest = divmod(shape[0], ranks)
    assert rest == 0, "all ranks hold as much"
    return rows, *shape[1:]


def empty(shape: tuple[int, ...], dtype: torch.dtype, phase: int | None) -> torch.Tensor:
    """An untouched tensor that starts `phase` bytes after a page boundary; None: at the allocator's choice."""
    if phase is None:
        return torch.empty(shape, dtype=dtype)
    count = torch.Size(shape).numel() * dtype.itemsize
    tensor = torch.empty(count + PAGE_BYTES, dtype=torch.uint8)
    start = (phase - tensor.data_ptr()) % PAGE_BYTES
    return tensor[start : start + count].view(dtype).view(shape)


def build(layout: Layout, phase: int | None = None, rank: int = 0, ranks: int = 1) -> State:
    """The state, or one rank's part of it, built and touched; its values depend only on names and rank."""
    state = layout.empty(phase, ranks)
    values = Values(rank)
    for name, tensor in flatten(state).items():
        values.fill(name, tensor)
    return state


def flatten(state: State) -> Tensors:
    """Dotted names to the state's own tensors."""
    flat: Tensors = {}

    def walk(prefix: str, node: object) -> None:
        if isinstance(node, torch.Tensor):
            flat[prefix] = node
            return
        assert isinstance(node, dict)
        for key, value in node.items():
            walk(f"{prefix}.{key}" if prefix else key, value)

    walk("", state)
    return flat


def spoil(state: State) -> None:
    """Overwrite every byte with a value that no saved state has everywhere, so that a load must restore them all."""
    for tensor in flatten(state).values():
        tensor.view(-1).view(torch.uint8).fill_(0x5A)


def is_exact(state: State, rank: int = 0) -> bool:
    """Whether every byte is what `build` makes."""
    values = Values(rank)
    return all(values.fills(name, tensor) for name, tensor in flatten(state).items())


class Values:
    """The values of every tensor, determined by its name and rank; the same in every process."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        block = torch.randn(BLOCK_ITEMS, generator=torch.Generator().manual_seed(20240731)) * 0.02
        self._blocks = {dtype: block.to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        for part, expected in self._stretches(name, tensor):
            part.copy_(expected)

    def fills(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether every byte is what `fill` would put there; as integers, since a NaN is not equal to itself."""
        whole = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        return all(torch.equal(p.view(whole), expected.view(whole)) for p, expected in self._stretches(name, tensor))

    def _stretches(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        block, flat = self._blocks[tensor.dtype], tensor.view(-1)
        offset = zlib.crc32(f"{name} {self._rank}".encode()) % BLOCK_ITEMS
        done = 0
        while done < flat.numel():
            count = min(flat.numel() - done, BLOCK_ITEMS - offset)
            yield flat[done : done + count], block[offset : offset + count]
            done, offset = done + count, 0
