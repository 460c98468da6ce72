"""The mixes: which sizes the tensors of a rank have. There is a synthetic mix, and one for each of three models.

The models are those of Gossman et al.: their job script (public repository llm-restart-perf) gives the shapes,
Llama-3.2-3B, Mistral-7B and Llama-2-13B with the 50,688 rows of a padded GPT-2 vocabulary, trained by
Megatron-DeepSpeed with ZeRO-1 in bf16, tensor parallel 4, pipeline parallel 1, 2 and 4, data parallel 1. Their logs
list the resulting files. The sizes in this module, derived from the shapes, equal the logged sizes to the byte, without
headers: layers of 50,344,360 and 109,068,712 bytes in 6 tensors, optimizer files of 9,392,110,303 and 11,093,416,609.
For 13B the logs have only the layer's 152 MiB; its sizes are derived in the same way. A rank in this module is of
tensor-parallel group 0, pipeline stage 0; the four ranks of a group have the same sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt

from flowstone.config import BLOCK_BYTES, KIB
from flowstone_study.records import Cell, MixName

SYNTHETIC_TENSORS = 8  # each process has so many large tensors of equal size
TINY_BELOW_BYTES = 64 * KIB  # smaller tensors, such as norms, keep their size in a small study
_TENSOR_PARALLEL = 4
_VOCABULARY_ROWS = 50_688
_RANK_STATE_BYTES = 5_273_104  # size of mp_rank_*_model_states.pt, which has generators, scheduler and arguments


@dataclass(frozen=True, slots=True)
class Model:
    """One pipeline stage of a decoder with gated feed-forward layers.

    layers   number of layers in this stage
    stages   number of stages; 1: this stage also has the final norm and the output embedding
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
    """The sizes of one process' tensors in bytes, in the order of writing. They are the same for every process."""
    each = cell.bytes // cell.processes
    if cell.mix == "synthetic":
        tensors = min(SYNTHETIC_TENSORS, each // BLOCK_BYTES)
        return (each // tensors // BLOCK_BYTES * BLOCK_BYTES,) * tensors
    return _scaled(MODELS[cell.mix], each)


def model_tensor_bytes(model: Model) -> tuple[int, ...]:
    """The sizes of a model's tensors in bytes, not scaled, in the order of the checkpoint's files: layers, the rank's
    own state, optimizer.

    A layer has a fused query-key-value matrix, the attention's output, a fused gate and up matrix, the down matrix, and
    two norms. The optimizer has fp32 weights and two moments, flattened: once for the parameters with weight decay, and
    once for the norms.
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
    """The sizes of the model's tensors, scaled so that a rank has about `wanted_bytes`.

    If s is the square root of the scaling factor, there are s times as many layers, with tensors of s times the size
    (in full blocks). So both the number and the size of tensors shrink, and large tensors keep their share of the
    bytes. Norms keep their size.
    """
    full = sum(model_tensor_bytes(model))
    layers = max(1, min(model.layers, round(model.layers * sqrt(wanted_bytes / full))))
    sizes = model_tensor_bytes(replace(model, layers=layers))
    tiny = sum(size for size in sizes if size < TINY_BELOW_BYTES)
    scale = (wanted_bytes - tiny) / (sum(sizes) - tiny)
    if scale <= 0:
        raise ValueError(f"{wanted_bytes} bytes per process are too few: the norms of one layer need more")
    return tuple(
        size if size < TINY_BELOW_BYTES else max(1, round(size * scale / BLOCK_BYTES)) * BLOCK_BYTES for size in sizes
    )
