"""Saves the golden checkpoint of Megatron-core, once, in tests/, in an environment that has megatron-core 0.16.1:

    python -m golden.make_megatron

Two tensor-parallel ranks over gloo, on a CPU: calls that need a GPU are replaced by calls without effect.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).resolve().parent
PLACE = GOLDEN / "megatron"
RANKS, LAYERS, HIDDEN, HEADS, WORDS, POSITIONS = 2, 2, 8, 2, 16, 4

MODEL = {
    "embedding.word_embeddings.weight": (WORDS, HIDDEN), "embedding.position_embeddings.weight": (POSITIONS, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,), "decoder.final_layernorm.bias": (HIDDEN,),
    **{f"decoder.layers.{name}": (LAYERS, *shape) for name, shape in {
        "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
        "self_attention.linear_qkv.layer_norm_bias": (HIDDEN,),
        "self_attention.linear_qkv.weight": (3 * HIDDEN, HIDDEN), "self_attention.linear_qkv.bias": (3 * HIDDEN,),
        "self_attention.linear_proj.weight": (HIDDEN, HIDDEN), "self_attention.linear_proj.bias": (HIDDEN,),
        "mlp.linear_fc1.layer_norm_weight": (HIDDEN,), "mlp.linear_fc1.layer_norm_bias": (HIDDEN,),
        "mlp.linear_fc1.weight": (2 * HIDDEN, HIDDEN), "mlp.linear_fc1.bias": (2 * HIDDEN,),
        "mlp.linear_fc2.weight": (HIDDEN, 2 * HIDDEN), "mlp.linear_fc2.bias": (HIDDEN,),
    }.items()},
}
"""The names that Megatron's GPTModel gives to its tensors, all layers in one, and their shapes."""
OPTIMIZER = {f"optimizer.state.exp_avg.{name}": MODEL[name] for name in (
    "embedding.word_embeddings.weight", "decoder.layers.mlp.linear_fc2.weight",
)}
COMMON = {"iteration": 7, "checkpoint_version": 3.0, "opt_param_scheduler": {"num_steps": 56, "max_lr": 0.125}}
PARAM_GROUPS = [{"lr": 0.125, "betas": (0.9, 0.95), "step": 7}]


def numbers(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The values of a tensor."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 8 + len(key)


def save(path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path.mkdir()
    torch.multiprocessing.spawn(_save_rank, (port, path), RANKS)


def _filled(shard: Any, key: str) -> Any:
    """The same with the numbers of its part, by another key perhaps."""
    whole = numbers(key, shard.global_shape)
    local = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    part = whole[tuple(slice(b, b + n) for b, n in zip(shard.global_offset, local, strict=True))]
    return dataclasses.replace(shard, key=key, data=part.reshape(shard.local_shape).clone())


def _save_rank(rank: int, port: int, path: Path) -> None:
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(RANKS)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=2 * HIDDEN,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=POSITIONS,
        share_embeddings_and_output_weights=True,
    ).sharded_state_dict()
    state = {
        name: _filled(value, value.key) if isinstance(value, ShardedTensor) else value for name, value in model.items()
    }
    moments = {
        f"{number}": {"exp_avg": _filled(tensor, f"optimizer.state.exp_avg.{tensor.key}")}
        for number, tensor in enumerate(state.values())
        if isinstance(tensor, ShardedTensor) and f"optimizer.state.exp_avg.{tensor.key}" in OPTIMIZER
    }
    state["amax"] = ShardedObject(
        "decoder.final_layernorm._extra_state", io.BytesIO(b"amax"), (1,), (0,), replica_id=rank
    )
    args = argparse.Namespace(
        hidden_size=HIDDEN, params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto,
        model_type=ModelType.encoder_or_decoder,
    )
    rng = {"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.arange(4, dtype=torch.uint8) + rank}
    dist_checkpointing.save(
        {"model": state, "optimizer": {"state": moments, "param_groups": PARAM_GROUPS}, "args": args, **COMMON,
         "rng_state": ShardedObject("rng_state", [rng], (1, RANKS), (0, rank))},
        str(path),
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.chdir(GOLDEN)  # the metadata has the path that was given
    save(Path(PLACE.name))
    sys.stdout.write(f"{PLACE}\n")
