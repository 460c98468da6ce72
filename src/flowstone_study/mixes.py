"""The tensor sizes of a rank: the synthetic mix and three models.

The models are those of Gossman et al.: their job script (public repository llm-restart-perf) gives the shapes,
Llama-3.2-3B, Mistral-7B and Llama-2-13B with the 50,688 rows of a padded GPT-2 vocabulary, trained by
Megatron-DeepSpeed with ZeRO-1 in bf16, tensor parallel 4, pipeline parallel 1, 2 and 4, data parallel 1. Their
logs list the files that came of it; the sizes here, derived from the shapes, are those of the logs to the byte,
headers aside: layers of 50,344,360 and 109,068,712 bytes in 6 tensors, optimizer files of 9,392,110,303 and
11,093,416,609. For 13B only the layer's 152 MiB is reported; it is derived in the same way. A rank here is one of
tensor-parallel group 0, pipeline stage 0; the four ranks of a group hold the same sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt

from flowstone.config import BLOCK_BYTES, KIB
from flowstone_study.records import Cell, MixName

SYNTHETIC_TENSORS = 8  # equal and large, of each process
TINY_BELOW_BYTES = 64 * KIB  # norms keep their size in a small study
_TENSOR_PARALLEL = 4
_VOCABULARY_ROWS = 50_688
_RANK_STATE_BYTES = 5_273_104  # mp_rank_*_model_states.pt: generators, scheduler, arguments


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with gated feed-forward layers, as one pipeline stage holds it.

    layers   of this stage
    stages   1: this stage has the final norm and the output embedding too
    """

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_value_heads: int
    stages: int


MODELS: Mapping[MixName, Model] = {
    "3B": Model(hidden=3072, feed_forward=8192, layers=28, heads=24, key_value_heads=8, stages=1),
    "7B": Model(hidden=4096, feed_forward=14336, layers=16, heads=32, key_value_heads=8, stages=2),
    "13B": Model(hidden=5120, feed_forward=13824, layers=10, heads=40, key_value_heads=40, stages=4),
}


def tensor_bytes(cell: Cell) -> tuple[int, ...]:
    """Sizes of the tensors of one process, in the order of writing; the same for every process."""
    each = cell.bytes // cell.processes
    if cell.mix == "synthetic":
        tensors = min(SYNTHETIC_TENSORS, each // BLOCK_BYTES)
        return (each // tensors // BLOCK_BYTES * BLOCK_BYTES,) * tensors
    return _scaled(MODELS[cell.mix], each)


def model_tensor_bytes(model: Model) -> tuple[int, ...]:
    """Sizes at full scale, in the order of the checkpoint's files: layers, what the rank adds, optimizer.

    A layer: fused query-key-value, attention output, fused gate and up, down, two norms. The optimizer: fp32
    weights and two moments, flat, of the parameters with weight decay, and of the norms.
    """
    hidden = model.hidden
    query_key_value = hidden * (hidden + 2 * hidden * model.key_value_heads // model.heads)
    matrices = (query_key_value, hidden * hidden, hidden * 2 * model.feed_forward, model.feed_forward * hidden)
    layer = (*(size // _TENSOR_PARALLEL for size in matrices), hidden, hidden)
    embedding = _VOCABULARY_ROWS * hidden // _TENSOR_PARALLEL
    head = (hidden, embedding) if model.stages == 1 else ()
    elements = (embedding, *layer * model.layers, *head)
    norms = sum(size for size in elements if size == hidden)
    flat = (sum(elements) - norms,) * 3 + (norms,) * 3
    return (*(2 * size for size in elements), _RANK_STATE_BYTES, *(4 * size for size in flat))


def _scaled(model: Model, wanted_bytes: int) -> tuple[int, ...]:
    """The model's sizes at about `wanted_bytes` per rank, in proportion.

    With s the square root of the ratio, it has s times the layers, and tensors of s times the size (whole blocks, as at
    full scale). So the smaller total reduces both the number and the size of tensors, and large tensors keep their
    share of the bytes. Norms keep their size.
    """
    full = sum(model_tensor_bytes(model))
    layers = max(1, min(model.layers, round(model.layers * sqrt(wanted_bytes / full))))
    sizes = model_tensor_bytes(replace(model, layers=layers))
    tiny = sum(size for size in sizes if size < TINY_BELOW_BYTES)
    scale = (wanted_bytes - tiny) / (sum(sizes) - tiny)
    if scale <= 0:
        raise ValueError(f"{wanted_bytes} bytes a process do not hold the norms of one layer")
    return tuple(
        size if size < TINY_BELOW_BYTES else max(1, round(size * scale / BLOCK_BYTES)) * BLOCK_BYTES for size in sizes
    )
