"""Ready rules between the names of Megatron-core and those of Hugging Face: GPT-2, Llama, Mixtral.

Facts, as both programs have them: Megatron keeps queries, keys and values in one matrix, interleaved by groups of heads
that share a key and a value, and the gate before the other half of the first matrix of an MLP; Transformer Engine's
layers hold the weight of the norm before them. GPT-2 of Hugging Face keeps its matrices transposed, and queries, keys
and values one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from flowstone.errors import ArgumentError
from flowstone.layout_rules import ConversionRule, Fuse, RuleSet, Split, Stack, Transpose, Unpad, Unstack
from flowstone.rules import Rename, Skip

_LAYER = "decoder.layers.{n}"
_STACKED = "decoder.layers"  # in a distributed checkpoint of Megatron: all layers in one tensor
_FINAL_NORM, _WORDS, _HEAD = "decoder.final_layernorm", "embedding.word_embeddings.weight", "output_layer.weight"


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the shapes of tensors do not tell.

    heads       of queries
    groups      of heads that share a key and a value; as many as heads where there are none
    vocabulary, padded_vocabulary  rows of the embedding at Hugging Face and in Megatron, where these differ
    norms       "fused": in the layers that follow them (Transformer Engine); "separate"
    experts     "sequential": modules of their own; "grouped": weight0, weight1, ... of one module; "stacked": all in
                one tensor, as a distributed checkpoint has either
    layers      "apart", or "stacked": as a distributed checkpoint has them (torch_dist); then experts are stacked, too
    huggingface "files": as `save_pretrained` writes the model; "memory": as transformers 5 has it, where this differs
                (Mixtral's experts, which are stacked)
    """

    heads: int
    groups: int = 0
    vocabulary: int = 0
    padded_vocabulary: int = 0
    norms: str = "fused"
    experts: str = "sequential"
    layers: str = "apart"
    huggingface: str = "files"


_CHOICES = {
    "norms": ("fused", "separate"), "experts": ("sequential", "grouped", "stacked"), "layers": ("apart", "stacked"),
    "huggingface": ("files", "memory"),
}


def ready_rules(name: str, config: Mapping[str, Any] | str | bytes | None = None, /, **sizes: int | str) -> RuleSet:
    """A set by its name: "megatron-to-llama", "llama-to-megatron"; also gpt2 and mixtral.

    config  the model's config.json of Hugging Face, which tells sizes that are not given
    sizes   see Sizes: heads=32, groups=8, ...

    raises  ArgumentError for a set that is not known, and a size that is neither given nor in the configuration
    """
    model = name.removeprefix("megatron-to-").removesuffix("-to-megatron") if isinstance(name, str) else ""
    if model not in _MODELS or name not in (f"megatron-to-{model}", f"{model}-to-megatron"):
        raise ArgumentError(
            f"there are no ready rules {name!r:.60}", expected=", ".join(names()), next="give one of them, or a file"
        )
    known = _from_config(config)
    found = _sizes(name, known | sizes)
    rules, optional = _MODELS[model](found)
    if found.layers == "stacked":
        rules = [*_unstacked(rules), *rules]
    if model != "gpt2" and not known and "groups" not in sizes:  # as many as heads would divide it too, and wrongly
        raise ArgumentError(
            f"{name}: how many groups of heads share a key and a value is not said", expected="groups=8",
            next="give groups, as many as heads where each has its own, or the model's config.json",
        )
    ready = RuleSet((*_unpadded(found), *rules), name, tuple(optional), complete=True)
    if name.startswith("megatron"):
        return RuleSet((Skip("*._extra_state*"), *ready.rules), name, ready.optional, complete=True)
    undone = ready.inverse
    return RuleSet((*(Skip(one) for one in _BUFFERS[model]), *undone.rules), name, undone.optional, complete=True)


def names() -> list[str]:
    """All sets."""
    return [one for model in _MODELS for one in (f"megatron-to-{model}", f"{model}-to-megatron")]


def _from_config(config: Mapping[str, Any] | str | bytes | None) -> dict[str, Any]:
    try:
        known = json.loads(config) if isinstance(config, str | bytes) else config or {}
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"the configuration is no JSON: {error!s:.100}", next="give the sizes by name") from error
    if not isinstance(known, Mapping):
        raise ArgumentError("the configuration is no table of names", next="give the sizes by name")
    keys = {"heads": ("num_attention_heads", "n_head"), "groups": ("num_key_value_heads",),
            "vocabulary": ("vocab_size",)}
    return {size: known[key] for size, among in keys.items() for key in among if known.get(key) is not None}


def _sizes(name: str, given: Mapping[str, Any]) -> Sizes:
    try:
        found = msgspec.convert(dict(given), Sizes, strict=False)
    except msgspec.ValidationError as error:
        raise ArgumentError(
            f"{name}: {error}", expected=", ".join(Sizes.__struct_fields__),
            next="write heads=32, or give the model's config.json",
        ) from error
    for field, among in _CHOICES.items():
        if getattr(found, field) not in among:
            raise ArgumentError(f"{name}: {field}={getattr(found, field)!r:.40}", expected=" or ".join(among),
                                next="correct it")
    if found.padded_vocabulary and not found.vocabulary:
        raise ArgumentError(f"{name}: padded_vocabulary is given without vocabulary", next="give both")
    groups = found.groups or found.heads
    if found.heads < 1 or groups < 1 or found.heads % groups:
        raise ArgumentError(f"{name}: {found.heads} heads are not {groups} groups", next="correct heads or groups")
    return msgspec.structs.replace(found, groups=groups)


def _unpadded(sizes: Sizes) -> Iterator[ConversionRule]:
    if sizes.padded_vocabulary:
        for which, required in ((_WORDS, True), (_HEAD, False)):
            yield Unpad(which, sizes.vocabulary, sizes.padded_vocabulary, required=required)


def _unstacked(rules: list[ConversionRule]) -> Iterator[ConversionRule]:
    for rule in rules:
        source = getattr(rule, "source", "")
        if source.startswith(f"{_LAYER}.") and "{e}" not in source:  # experts are stacked within their layers
            leaf = source.removeprefix(_LAYER)
            yield Unstack(_STACKED + leaf, source, required=getattr(rule, "required", not leaf.endswith(".bias")))


_Made = tuple[list[ConversionRule], list[str]]
"""Rules from Megatron to Hugging Face, and the Renames among them that may name nothing."""


def _attention(sizes: Sizes, layer: str) -> _Made:
    """Of Llama and Mixtral; a bias where a model of the family has one."""
    renames = [(f"{_LAYER}.self_attention.linear_proj.{one}", f"{layer}.self_attn.o_proj.{one}")
               for one in ("weight", "bias")]
    split: list[ConversionRule] = [
        Split(
            f"{_LAYER}.self_attention.linear_qkv.{one}", tuple(f"{layer}.self_attn.{p}_proj.{one}" for p in "qkv"),
            parts=(sizes.heads, sizes.groups, sizes.groups), groups=sizes.groups, required=one == "weight",
        )
        for one in ("weight", "bias")
    ]
    return [*split, *(Rename(*pair) for pair in renames)], [renames[1][0]]


def _ends(words: str, norm: str) -> _Made:
    """What comes before the first layer and after the last."""
    return [
        Rename(_WORDS, words), Rename(f"{_FINAL_NORM}.weight", f"{norm}.weight"), Rename(_HEAD, "lm_head.weight")
    ], [_HEAD]


def _llama(sizes: Sizes) -> _Made:
    layer = "model.layers.{n}"
    ends, attention = _ends("model.embed_tokens.weight", "model.norm"), _attention(sizes, layer)
    first, second = _norms(sizes)
    return [
        *ends[0], *attention[0], Rename(f"{first}weight", f"{layer}.input_layernorm.weight"),
        Rename(f"{second}weight", f"{layer}.post_attention_layernorm.weight"),
        Split(f"{_LAYER}.mlp.linear_fc1.weight", (f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight")),
        Rename(f"{_LAYER}.mlp.linear_fc2.weight", f"{layer}.mlp.down_proj.weight"),
    ], ends[1] + attention[1]


def _mixtral(sizes: Sizes) -> _Made:
    layer = "model.layers.{n}"
    ends, attention = _ends("model.embed_tokens.weight", "model.norm"), _attention(sizes, layer)
    inner = f"{layer}.mlp" if sizes.huggingface == "memory" else f"{layer}.block_sparse_moe"
    return [
        *ends[0], *attention[0], Rename(f"{_norms(sizes)[0]}weight", f"{layer}.input_layernorm.weight"),
        Rename(f"{_LAYER}.pre_mlp_layernorm.weight", f"{layer}.post_attention_layernorm.weight"),
        Rename(f"{_LAYER}.mlp.router.weight", f"{inner}.gate.weight"),
        *_experts(sizes, f"{inner}.experts"),
    ], ends[1] + attention[1]


def _experts(sizes: Sizes, inner: str) -> Iterator[ConversionRule]:
    """Of Mixtral. Megatron, and transformers 5 in memory, have gate and up in one matrix."""
    outer = f"{_LAYER}.mlp.experts"
    is_stacked = "stacked" in (sizes.experts, sizes.layers)
    is_grouped = sizes.experts == "grouped" and not is_stacked
    names = (
        ("linear_fc1", f"{inner}.gate_up_proj", ("w1", "w3")), ("linear_fc2", f"{inner}.down_proj", ("w2",)),
    )
    for linear, joined, parts in names:
        stacked = f"{outer}.experts.{linear}.weight"
        one = f"{outer}.{linear}.weight{{e}}" if is_grouped else f"{outer}.local_experts.{{e}}.{linear}.weight"
        if sizes.huggingface == "memory":
            yield Rename(stacked, joined) if is_stacked else Stack(one, joined)
            continue
        if is_stacked:
            yield Unstack(stacked, one)
        targets = tuple(f"{inner}.{{e}}.{part}.weight" for part in parts)
        yield Split(one, targets) if len(targets) > 1 else Rename(one, targets[0])


def _gpt2(sizes: Sizes) -> _Made:
    layer = "transformer.h.{n}"
    ends = _ends("transformer.wte.weight", "transformer.ln_f")
    rules = [
        *ends[0], Rename(f"{_FINAL_NORM}.bias", "transformer.ln_f.bias"),
        Rename("embedding.position_embeddings.weight", "transformer.wpe.weight"),
    ]
    first, second = _norms(sizes)
    for one in ("weight", "bias"):
        parts = tuple(f"{layer}.attn.{part}.{one}" for part in ("query", "key", "value"))
        rules += [
            Rename(f"{first}{one}", f"{layer}.ln_1.{one}"), Rename(f"{second}{one}", f"{layer}.ln_2.{one}"),
            Split(f"{_LAYER}.self_attention.linear_qkv.{one}", parts, groups=sizes.heads),
            Fuse(parts, f"{layer}.attn.c_attn.{one}"),
            Rename(f"{_LAYER}.self_attention.linear_proj.{one}", f"{layer}.attn.c_proj.{one}"),
            Rename(f"{_LAYER}.mlp.linear_fc1.{one}", f"{layer}.mlp.c_fc.{one}"),
            Rename(f"{_LAYER}.mlp.linear_fc2.{one}", f"{layer}.mlp.c_proj.{one}"),
        ]
    matrices = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return [*rules, *(Transpose(f"{layer}.{matrix}.weight") for matrix in matrices)], ends[1]


def _norms(sizes: Sizes) -> tuple[str, str]:
    """What the names of the two norms of a layer begin with."""
    if sizes.norms == "separate":
        return f"{_LAYER}.input_layernorm.", f"{_LAYER}.pre_mlp_layernorm."
    return f"{_LAYER}.self_attention.linear_qkv.layer_norm_", f"{_LAYER}.mlp.linear_fc1.layer_norm_"


_MODELS: Mapping[str, Callable[[Sizes], _Made]] = {"gpt2": _gpt2, "llama": _llama, "mixtral": _mixtral}
_BUFFERS: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("*.attn.bias", "*.attn.masked_bias"), "llama": ("*.rotary_emb.inv_freq",),
    "mixtral": ("*.rotary_emb.inv_freq",),
}
"""What older checkpoints have besides: constants."""


__all__ = ["ready_rules"]
