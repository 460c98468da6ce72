"""Ready rules between the names of Megatron-core and Hugging Face: GPT-2, Llama, Mixtral.

The formats differ. Megatron stores queries, keys and values in one matrix, interleaved by groups of heads that share a
key and a value. It also stores the gate and up projections of an MLP in one matrix, with the gate first. Transformer
Engine's layers contain the weight of the norm before them. Hugging Face's GPT-2 stores its matrices transposed, with
queries, keys and values one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from flowstone.errors import ArgumentError
from flowstone.layouts.layout_rules import ConversionRule, Fuse, RuleSet, Split, Stack, Transpose, Unpad, Unstack
from flowstone.rules.load_rules import Rename, Skip

_LAYER = "decoder.layers.{n}"
_STACKED = "decoder.layers"  # the name in a distributed checkpoint of Megatron that has all layers in one tensor
_FINAL_NORM, _EMBEDDING, _HEAD = "decoder.final_layernorm", "embedding.word_embeddings.weight", "output_layer.weight"


class ModelSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts about a model that the shapes of its tensors do not show.

    heads       query heads
    groups      groups of heads that share a key and a value; equal to heads if the model has no grouped-query
                attention
    vocabulary, padded_vocabulary  how many rows the embedding has in Hugging Face and in Megatron, if these numbers
                                   differ
    norms       where the norms' weights are. "fused": in the layers that follow the norms (Transformer Engine);
                "separate": in modules of their own
    experts     "sequential": one module for each expert. "grouped": weight0, weight1, ... of one module. "stacked": all
                experts in one tensor, as distributed checkpoints of both kinds store them
    layers      "apart": separate tensors; "stacked": one tensor for all layers, as in a distributed checkpoint
                (torch_dist), which also stacks experts
    huggingface "files": names as `save_pretrained` writes them; "memory": names of the model in transformers 5, if
                they differ (Mixtral's experts are stacked)
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
    """The RuleSet with this name: "megatron-to-llama", "llama-to-megatron", and the same for gpt2 and mixtral.

    config  the model's config.json (Hugging Face): its content as text or bytes, or as a dict. Provides the sizes that
            are not passed in `sizes`
    sizes   the fields of ModelSizes: heads=32, groups=8, ...

    raises  ArgumentError  the name is not known, or a size is neither in `sizes` nor in `config`
    """
    model = name.removeprefix("megatron-to-").removesuffix("-to-megatron") if isinstance(name, str) else ""
    if model not in _MODELS or name not in (f"megatron-to-{model}", f"{model}-to-megatron"):
        raise ArgumentError(
            f"no ready rules are named {name!r:.60}", expected=", ".join(names()),
            next="give one of these names, or a file with rules",
        )
    config_sizes = _from_config(config)
    checked_sizes = _sizes(name, config_sizes | sizes)
    rules, optional = _MODELS[model](checked_sizes)
    if checked_sizes.layers == "stacked":
        rules = [*_unstacked(rules), *rules]
    # without these, groups = heads could be assumed wrongly
    if model != "gpt2" and not config_sizes and "groups" not in sizes:
        raise ArgumentError(
            f"{name}: the number of groups of heads that share a key and a value is missing", expected="groups=8",
            next="give groups (equal to heads if the model has no grouped-query attention), or the model's config.json",
        )
    ready = RuleSet((*_unpadded(checked_sizes), *rules), name, tuple(optional), complete=True)
    if name.startswith("megatron"):
        return RuleSet((Skip("*._extra_state*"), *ready.rules), name, ready.optional, complete=True)
    undone = ready.inverse
    skips = map(Skip, _BUFFERS[model])
    return RuleSet((*skips, *undone.rules), name, undone.optional, complete=True)


def names() -> list[str]:
    """The names of all ready rules."""
    return [name for model in _MODELS for name in (f"megatron-to-{model}", f"{model}-to-megatron")]


def _from_config(config: Mapping[str, Any] | str | bytes | None) -> dict[str, Any]:
    try:
        values = json.loads(config) if isinstance(config, str | bytes) else config or {}
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"the model's config.json is not valid JSON: {error!s:.100}",
            next="correct config.json, or pass the model's sizes, such as heads=32, instead",
        ) from error
    if not isinstance(values, Mapping):
        raise ArgumentError(
            "the model's config.json is not a JSON object",
            next="correct config.json, or pass the model's sizes, such as heads=32, instead",
        )
    keys = {"heads": ("num_attention_heads", "n_head"), "groups": ("num_key_value_heads",),
            "vocabulary": ("vocab_size",)}
    return {size: values[key] for size, among in keys.items() for key in among if values.get(key) is not None}


def _sizes(name: str, given: Mapping[str, Any]) -> ModelSizes:
    try:
        checked = msgspec.convert(dict(given), ModelSizes, strict=False)
    except msgspec.ValidationError as error:
        raise ArgumentError(
            f"{name}: {error}", expected=", ".join(ModelSizes.__struct_fields__),
            next="write heads=32, or give the model's config.json",
        ) from error
    for field, among in _CHOICES.items():
        if getattr(checked, field) not in among:
            raise ArgumentError(
                f"{name}: invalid {field}={getattr(checked, field)!r:.40}", expected=" or ".join(among),
                next="give one of these values",
            )
    if checked.padded_vocabulary and not checked.vocabulary:
        raise ArgumentError(f"{name}: padded_vocabulary was given without vocabulary", next="give both")
    groups = checked.groups or checked.heads
    if checked.heads < 1 or groups < 1 or checked.heads % groups:
        raise ArgumentError(
            f"{name}: {checked.heads} heads cannot be divided into {groups} groups",
            next="correct the number of heads or of groups",
        )
    return msgspec.structs.replace(checked, groups=groups)


def _unpadded(sizes: ModelSizes) -> Iterator[ConversionRule]:
    if sizes.padded_vocabulary:
        for which, required in ((_EMBEDDING, True), (_HEAD, False)):
            yield Unpad(which, sizes.vocabulary, sizes.padded_vocabulary, required=required)


def _unstacked(rules: list[ConversionRule]) -> Iterator[ConversionRule]:
    for rule in rules:
        source = getattr(rule, "source", "")
        if source.startswith(f"{_LAYER}.") and "{e}" not in source:  # experts are stacked in one tensor for each layer
            leaf = source.removeprefix(_LAYER)
            yield Unstack(_STACKED + leaf, source, required=getattr(rule, "required", not leaf.endswith(".bias")))


_FamilyRules = tuple[list[ConversionRule], list[str]]
"""Rules from Megatron to Hugging Face, and the names of those Renames that may match nothing."""


def _attention(sizes: ModelSizes, layer: str) -> _FamilyRules:
    """The rules for the attention of Llama and Mixtral. Those for biases need not match."""
    renames = [(f"{_LAYER}.self_attention.linear_proj.{kind}", f"{layer}.self_attn.o_proj.{kind}")
               for kind in ("weight", "bias")]
    split: list[ConversionRule] = [
        Split(
            f"{_LAYER}.self_attention.linear_qkv.{kind}", tuple(f"{layer}.self_attn.{p}_proj.{kind}" for p in "qkv"),
            parts=(sizes.heads, sizes.groups, sizes.groups), groups=sizes.groups, required=kind == "weight",
        )
        for kind in ("weight", "bias")
    ]
    return [*split, *(Rename(*pair) for pair in renames)], [renames[1][0]]


def _embedding_rules(words: str, norm: str) -> _FamilyRules:
    """The rules for the embedding, the final norm and the output layer."""
    return [
        Rename(_EMBEDDING, words), Rename(f"{_FINAL_NORM}.weight", f"{norm}.weight"), Rename(_HEAD, "lm_head.weight")
    ], [_HEAD]


def _llama(sizes: ModelSizes) -> _FamilyRules:
    layer = "model.layers.{n}"
    ends, attention = _embedding_rules("model.embed_tokens.weight", "model.norm"), _attention(sizes, layer)
    first, second = _norms(sizes)
    return [
        *ends[0], *attention[0], Rename(f"{first}weight", f"{layer}.input_layernorm.weight"),
        Rename(f"{second}weight", f"{layer}.post_attention_layernorm.weight"),
        Split(f"{_LAYER}.mlp.linear_fc1.weight", (f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight")),
        Rename(f"{_LAYER}.mlp.linear_fc2.weight", f"{layer}.mlp.down_proj.weight"),
    ], ends[1] + attention[1]


def _mixtral(sizes: ModelSizes) -> _FamilyRules:
    layer = "model.layers.{n}"
    ends, attention = _embedding_rules("model.embed_tokens.weight", "model.norm"), _attention(sizes, layer)
    inner = f"{layer}.mlp" if sizes.huggingface == "memory" else f"{layer}.block_sparse_moe"
    return [
        *ends[0], *attention[0], Rename(f"{_norms(sizes)[0]}weight", f"{layer}.input_layernorm.weight"),
        Rename(f"{_LAYER}.pre_mlp_layernorm.weight", f"{layer}.post_attention_layernorm.weight"),
        Rename(f"{_LAYER}.mlp.router.weight", f"{inner}.gate.weight"),
        *_experts(sizes, f"{inner}.experts"),
    ], ends[1] + attention[1]


def _experts(sizes: ModelSizes, inner: str) -> Iterator[ConversionRule]:
    """The rules for the experts of Mixtral. Megatron, and transformers 5 in memory, store the gate and up projections
    in one matrix.
    """
    outer = f"{_LAYER}.mlp.experts"
    is_stacked = "stacked" in (sizes.experts, sizes.layers)
    is_grouped = sizes.experts == "grouped" and not is_stacked
    names = (
        ("linear_fc1", f"{inner}.gate_up_proj", ("w1", "w3")), ("linear_fc2", f"{inner}.down_proj", ("w2",)),
    )
    for linear, joined, parts in names:
        stacked = f"{outer}.experts.{linear}.weight"
        single = f"{outer}.{linear}.weight{{e}}" if is_grouped else f"{outer}.local_experts.{{e}}.{linear}.weight"
        if sizes.huggingface == "memory":
            yield Rename(stacked, joined) if is_stacked else Stack(single, joined)
            continue
        if is_stacked:
            yield Unstack(stacked, single)
        targets = tuple(f"{inner}.{{e}}.{part}.weight" for part in parts)
        yield Split(single, targets) if len(targets) > 1 else Rename(single, targets[0])


def _gpt2(sizes: ModelSizes) -> _FamilyRules:
    layer = "transformer.h.{n}"
    ends = _embedding_rules("transformer.wte.weight", "transformer.ln_f")
    rules = [
        *ends[0], Rename(f"{_FINAL_NORM}.bias", "transformer.ln_f.bias"),
        Rename("embedding.position_embeddings.weight", "transformer.wpe.weight"),
    ]
    first, second = _norms(sizes)
    for kind in ("weight", "bias"):
        parts = tuple(f"{layer}.attn.{part}.{kind}" for part in ("query", "key", "value"))
        rules += [
            Rename(f"{first}{kind}", f"{layer}.ln_1.{kind}"), Rename(f"{second}{kind}", f"{layer}.ln_2.{kind}"),
            Split(f"{_LAYER}.self_attention.linear_qkv.{kind}", parts, groups=sizes.heads),
            Fuse(parts, f"{layer}.attn.c_attn.{kind}"),
            Rename(f"{_LAYER}.self_attention.linear_proj.{kind}", f"{layer}.attn.c_proj.{kind}"),
            Rename(f"{_LAYER}.mlp.linear_fc1.{kind}", f"{layer}.mlp.c_fc.{kind}"),
            Rename(f"{_LAYER}.mlp.linear_fc2.{kind}", f"{layer}.mlp.c_proj.{kind}"),
        ]
    matrices = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return [*rules, *(Transpose(f"{layer}.{matrix}.weight") for matrix in matrices)], ends[1]


def _norms(sizes: ModelSizes) -> tuple[str, str]:
    """What the names of a layer's two norms begin with."""
    if sizes.norms == "separate":
        return f"{_LAYER}.input_layernorm.", f"{_LAYER}.pre_mlp_layernorm."
    return f"{_LAYER}.self_attention.linear_qkv.layer_norm_", f"{_LAYER}.mlp.linear_fc1.layer_norm_"


_MODELS: Mapping[str, Callable[[ModelSizes], _FamilyRules]] = {"gpt2": _gpt2, "llama": _llama, "mixtral": _mixtral}
_BUFFERS: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("*.attn.bias", "*.attn.masked_bias"), "llama": ("*.rotary_emb.inv_freq",),
    "mixtral": ("*.rotary_emb.inv_freq",),
}
"""Constants that older checkpoints contain; the rules skip them."""


__all__ = ["ready_rules"]
