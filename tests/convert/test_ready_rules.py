"""The ready rules compared with numpy: a Megatron model and one of Hugging Face compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli.app import app

LAYERS, HEADS, GROUPS, HEAD, HIDDEN, INNER, WORDS, EXPERTS = 2, 6, 2, 4, 20, 12, 33, 3
Arrays = dict[str, np.ndarray]


def made(rng: np.random.Generator, **shapes: tuple[int, ...]) -> Arrays:
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def huggingface(model: str) -> Arrays:
    """The tensors of a small model, by the names and shapes that `save_pretrained` gives them."""
    rng = np.random.default_rng(0)
    if model == "gpt2":
        result = made(rng, **{"transformer.wte.weight": (WORDS, HEADS * HEAD),
                             "transformer.wpe.weight": (9, HEADS * HEAD),
                             "transformer.ln_f.weight": (HEADS * HEAD,), "transformer.ln_f.bias": (HEADS * HEAD,)})
        width = HEADS * HEAD
        for n in range(LAYERS):
            sides = {"ln_1": (width,), "ln_2": (width,), "attn.c_attn": (width, 3 * width),
                     "attn.c_proj": (width, width), "mlp.c_fc": (width, INNER), "mlp.c_proj": (INNER, width)}
            for name, shape in sides.items():
                result |= made(rng, **{f"transformer.h.{n}.{name}.weight": shape,
                                      f"transformer.h.{n}.{name}.bias": shape[-1:]})
        return result
    result = made(rng, **{"model.embed_tokens.weight": (WORDS, HIDDEN), "model.norm.weight": (HIDDEN,),
                         "lm_head.weight": (WORDS, HIDDEN)})
    for n in range(LAYERS):
        sides = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
                 "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (GROUPS * HEAD, HIDDEN),
                 "self_attn.v_proj": (GROUPS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD)}
        if model == "llama":
            sides |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
                      "mlp.down_proj": (HIDDEN, INNER)}
        else:
            sides["block_sparse_moe.gate"] = (EXPERTS, HIDDEN)
            for e in range(EXPERTS):
                sides |= {f"block_sparse_moe.experts.{e}.w{k}": (HIDDEN, INNER) if k == 2 else (INNER, HIDDEN)
                          for k in (1, 2, 3)}
        result |= made(rng, **{f"model.layers.{n}.{name}.weight": shape for name, shape in sides.items()})
    return result


def in_memory(files: Arrays) -> Arrays:
    """A Mixtral as transformers 5 has it in memory: the experts of a layer in two tensors."""
    result = {name.replace("block_sparse_moe", "mlp"): file for name, file in files.items() if ".experts." not in name}
    for n in range(LAYERS):
        parts = [[files[f"model.layers.{n}.block_sparse_moe.experts.{e}.w{k}.weight"] for e in range(EXPERTS)]
                 for k in (1, 2, 3)]
        gate, down, up = map(np.stack, parts)
        result[f"model.layers.{n}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        result[f"model.layers.{n}.mlp.experts.down_proj"] = down
    return result


def as_sized(model: str, sizes: dict[str, Any]) -> Arrays:
    result = huggingface(model)
    return in_memory(result) if sizes.get("huggingface") == "memory" else result


def heads_of(fused: np.ndarray, x: np.ndarray, heads: int, groups: int) -> list[np.ndarray]:
    """Queries, keys and values as Megatron takes them out of what its fused matrix gives: for each group, its queries,
    then its key, then its value."""
    mixed = (x @ fused.T).reshape(groups, heads // groups + 2, HEAD)
    return [mixed[:, :-2].reshape(heads, HEAD), mixed[:, -2], mixed[:, -1]]


@pytest.fixture
def converted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Arrays, Arrays]:
    """A model, and what the rules to Megatron make of it."""
    model, sizes = request.param
    source = huggingface(model)
    save_file(source, tmp_path / "model.safetensors")
    fs.export(tmp_path / "model.safetensors", tmp_path / "megatron",
              rules=fs.ready_rules(f"{model}-to-megatron", **sizes))
    return source, load_file(tmp_path / "megatron" / "model.safetensors")


LLAMA = {"heads": HEADS, "groups": GROUPS}


@pytest.mark.parametrize("converted", [("llama", LLAMA), ("mixtral", LLAMA)], indirect=True)
def test_heads_are_grouped_as_megatron_takes_them_apart(converted: tuple[Arrays, Arrays]) -> None:
    source, actual = converted
    x = np.random.default_rng(1).standard_normal(HIDDEN).astype(np.float32)
    for n in range(LAYERS):
        parts = heads_of(actual[f"decoder.layers.{n}.self_attention.linear_qkv.weight"], x, HEADS, GROUPS)
        for part, name in zip(parts, "qkv", strict=True):
            own = source[f"model.layers.{n}.self_attn.{name}_proj.weight"]
            assert np.allclose(part.ravel(), own @ x, atol=1e-5)


@pytest.mark.parametrize("converted", [("gpt2", {"heads": HEADS})], indirect=True)
def test_gpt2_is_transposed_and_its_heads_interleaved(converted: tuple[Arrays, Arrays]) -> None:
    source, result = converted
    x = np.random.default_rng(1).standard_normal(HEADS * HEAD).astype(np.float32)
    layer, own = "decoder.layers.1.", "transformer.h.1."
    parts = heads_of(result[f"{layer}self_attention.linear_qkv.weight"], x, HEADS, HEADS)
    assert np.allclose(np.concatenate([p.ravel() for p in parts]), x @ source[f"{own}attn.c_attn.weight"], atol=1e-5)
    bias = result[f"{layer}self_attention.linear_qkv.bias"].reshape(HEADS, 3, HEAD)
    assert np.array_equal(bias.transpose(1, 0, 2).ravel(), source[f"{own}attn.c_attn.bias"])
    assert np.array_equal(result[f"{layer}mlp.linear_fc1.weight"], source[f"{own}mlp.c_fc.weight"].T)
    assert np.array_equal(result[f"{layer}mlp.linear_fc2.bias"], source[f"{own}mlp.c_proj.bias"])
    assert np.array_equal(result[f"{layer}self_attention.linear_qkv.layer_norm_bias"], source[f"{own}ln_1.bias"])
    assert np.array_equal(result["embedding.position_embeddings.weight"], source["transformer.wpe.weight"])


@pytest.mark.parametrize("converted", [("llama", LLAMA)], indirect=True)
def test_the_gate_comes_before_the_other_half(converted: tuple[Arrays, Arrays]) -> None:
    source, result = converted
    gate, up = np.split(result["decoder.layers.0.mlp.linear_fc1.weight"], 2)
    assert np.array_equal(gate, source["model.layers.0.mlp.gate_proj.weight"])
    assert np.array_equal(up, source["model.layers.0.mlp.up_proj.weight"])
    norm = result["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"]
    assert np.array_equal(norm, source["model.layers.0.post_attention_layernorm.weight"])


@pytest.mark.parametrize("converted", [
    ("mixtral", LLAMA), ("mixtral", {**LLAMA, "experts": "grouped", "norms": "separate"})
], indirect=True)
def test_experts_are_where_megatron_has_them(converted: tuple[Arrays, Arrays]) -> None:
    source, result = converted
    is_grouped = "decoder.layers.1.input_layernorm.weight" in result
    experts = "decoder.layers.1.mlp.experts."
    fc1 = result[f"{experts}linear_fc1.weight2" if is_grouped else f"{experts}local_experts.2.linear_fc1.weight"]
    own = "model.layers.1.block_sparse_moe."
    assert np.array_equal(fc1, np.concatenate([source[f"{own}experts.2.w{k}.weight"] for k in (1, 3)]))
    assert np.array_equal(result["decoder.layers.1.mlp.router.weight"], source[f"{own}gate.weight"])
    norm = source["model.layers.1.post_attention_layernorm.weight"]
    assert np.array_equal(result["decoder.layers.1.pre_mlp_layernorm.weight"], norm)


SETS: list[tuple[str, dict[str, Any]]] = [
    ("llama", LLAMA), ("llama", {**LLAMA, "norms": "separate"}), ("llama", {**LLAMA, "layers": "stacked"}),
    ("llama", {**LLAMA, "vocabulary": WORDS, "padded_vocabulary": 40}), ("gpt2", {"heads": HEADS}),
    ("gpt2", {"heads": HEADS, "layers": "stacked", "norms": "separate"}), ("mixtral", LLAMA),
    ("mixtral", {**LLAMA, "experts": "grouped"}), ("gpt2", {"heads": HEADS, "vocabulary": WORDS,
                                                          "padded_vocabulary": 64}),
    ("mixtral", {**LLAMA, "experts": "stacked", "norms": "separate"}), ("mixtral", {**LLAMA, "layers": "stacked"}),
    *(("mixtral", {**LLAMA, **stacked, "huggingface": "memory"}) for stacked in (
        {}, {"experts": "grouped"}, {"experts": "stacked"}, {"layers": "stacked"}
    )),
]


@pytest.mark.parametrize(("model", "sizes"), SETS)
def test_there_and_back_again_through_a_store_is_bit_equal(tmp_path: Path, model: str, sizes: dict[str, Any]) -> None:
    source = as_sized(model, sizes)
    save_file(source, tmp_path / "model.safetensors")
    report = fs.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run",
                                  rules=fs.ready_rules(f"{model}-to-megatron", **sizes))
    known = ("model.decoder.", "model.embedding.", "model.output_layer.")
    assert all(name.startswith(known) for name in report.tensors)
    if sizes.get("layers") == "stacked":
        shape = fs.open(tmp_path / "run").tensors["model.decoder.layers.self_attention.linear_proj.weight"].shape
        assert shape[0] == LAYERS
    rules = fs.ready_rules(f"megatron-to-{model}", **sizes)
    fs.export(tmp_path / "run", tmp_path / "hf", rules=rules)
    assert fs.diff(tmp_path / "model.safetensors", tmp_path / "hf").equal
    assert fs.diff(tmp_path / "run", tmp_path / "model.safetensors", rules=rules).equal


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    opened = fs.open(run)
    return {name.removeprefix("model."): opened.read(name) for name in opened.tensors}


@pytest.mark.parametrize(("model", "sizes"), SETS)
def test_a_load_gives_what_an_import_gives_and_back(tmp_path: Path, model: str, sizes: dict[str, Any]) -> None:
    source = {name: torch.from_numpy(item) for name, item in as_sized(model, sizes).items()}
    to, back = fs.ready_rules(f"{model}-to-megatron", **sizes), fs.ready_rules(f"megatron-to-{model}", **sizes)
    save_file(as_sized(model, sizes), tmp_path / "model.safetensors")
    fs.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "imported", rules=to)
    imported = tensors_of(tmp_path / "imported")
    loaded = {name: torch.full_like(tensor, -1) for name, tensor in imported.items()}
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": source})
        checkpointer.load({"model": loaded}, rules=to)
        assert all(torch.equal(loaded[name], imported[name]) for name in imported)
    again = {name: torch.full_like(tensor, -1) for name, tensor in source.items()}
    with fs.Checkpointer(tmp_path / "imported") as checkpointer:
        checkpointer.load({"model": again}, rules=back)
    assert all(torch.equal(again[name], source[name]) for name in source)


@pytest.mark.parametrize("stacked", [{"experts": "stacked"}, {"layers": "stacked"}])
def test_stacked_experts_are_those_of_modules_in_order(tmp_path: Path, stacked: dict[str, str]) -> None:
    source = huggingface("mixtral")
    for name, arrays in (("files", source), ("memory", in_memory(source))):
        save_file(arrays, tmp_path / f"{name}.safetensors")
        rules = fs.ready_rules("mixtral-to-megatron", **LLAMA, **stacked, huggingface=name)
        fs.import_checkpoint(tmp_path / f"{name}.safetensors", tmp_path / name, rules=rules)
    result = tensors_of(tmp_path / "files")
    fc1 = np.stack([
        [np.concatenate([source[f"model.layers.{n}.block_sparse_moe.experts.{e}.w{k}.weight"] for k in (1, 3)])
         for e in range(EXPERTS)] for n in range(LAYERS)
    ])
    if stacked == {"layers": "stacked"}:
        assert np.array_equal(result["decoder.layers.mlp.experts.experts.linear_fc1.weight"].numpy(), fc1)
    else:
        for n in range(LAYERS):
            mine = result[f"decoder.layers.{n}.mlp.experts.experts.linear_fc1.weight"].numpy()
            assert np.array_equal(mine, fc1[n])
    assert fs.diff(tmp_path / "files", tmp_path / "memory").equal


def test_a_configuration_tells_the_sizes(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file(huggingface("llama"), tmp_path / "hf" / "model.safetensors")
    config = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": WORDS}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    run = CliRunner().invoke
    done = run(app, ["import", str(tmp_path / "hf"), str(tmp_path / "run"), "--rules", "llama-to-megatron"])
    assert done.exit_code == 0, done.output
    done = run(app, ["export", str(tmp_path / "run"), str(tmp_path / "b"), "--rules",
                     "megatron-to-llama:padded_vocabulary=33"])  # sizes of the configuration that was kept
    assert done.exit_code == 0, done.output
    done = run(app, ["diff", str(tmp_path / "hf"), str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
    done = run(app, ["diff", str(tmp_path / "run"), str(tmp_path / "b"), "--rules", "megatron-to-llama", "--json"])
    assert done.exit_code == 0, done.output


def test_what_the_set_does_not_know_is_named(tmp_path: Path) -> None:
    arrays = huggingface("llama") | {"model.layers.0.self_attn.q_norm.weight": np.ones(HEAD, np.float32)}
    save_file(arrays, tmp_path / "model.safetensors")
    rules = fs.ready_rules("llama-to-megatron", **LLAMA)
    with pytest.raises(fs.MismatchError, match=r"llama-to-megatron has no rule for 1 tensors[\s\S]*q_norm"):
        fs.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run", rules=rules)
    fs.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run", rules=[fs.Skip("*.q_norm.weight"), rules])
    del arrays["model.layers.1.mlp.up_proj.weight"], arrays["model.layers.0.self_attn.q_norm.weight"]
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(fs.MismatchError, match=r"cannot be fused[\s\S]*model.layers.1.mlp.up_proj.weight"):
        fs.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "other", rules=rules)


@pytest.mark.parametrize(("name", "sizes", "message"), [
    ("megatron-to-bert", {"heads": 4}, "no ready rules"), ("llama", {"heads": 4}, "no ready rules"),
    ("megatron-to-llama", {}, "heads"), ("megatron-to-llama", {"heads": "many"}, "heads"),
    ("megatron-to-llama", {"heads": 6, "groups": 4}, "6 heads cannot be divided into 4 groups"),
    ("megatron-to-llama", {"heads": 4, "size": 4}, "size"), ("megatron-to-llama", {"heads": 4, "norms": "x"}, "fused"),
    ("megatron-to-llama", {"heads": 4, "padded_vocabulary": 64}, "without vocabulary"),
    ("mixtral-to-megatron", {"heads": 4, "groups": 4, "huggingface": "disk"}, "files or memory"),
    ("megatron-to-llama", {"heads": 32}, "groups of heads"), ("mixtral-to-megatron", {"heads": 32}, "groups of heads"),
    ("megatron-to-llama", {"heads": 4, "config": "x"}, "config"),
    ("megatron-to-llama", {"heads": 4, "name": "x"}, "name"),
])
def test_sizes_that_make_no_rules_are_refused(name: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.ArgumentError, match=message):
        fs.ready_rules(name, **sizes)


RULES = """
complete = true

[[rules]]
kind = "split"
source = "h.{n}.qkv"
targets = ["h.{n}.q", "h.{n}.k", "h.{n}.v"]
parts = [4, 1, 1]
groups = 2

[[rules]]
kind = "rename"
source = "head"
target = "lm_head"
required = false

[[rules]]
kind = "stack"
source = "h.{n}.q"
target = "q"
"""


def test_rules_come_from_files(tmp_path: Path) -> None:
    arrays = {f"h.{n}.qkv": np.random.default_rng(n).random((24, 5)) for n in range(3)}
    save_file(arrays, tmp_path / "a.safetensors")
    (tmp_path / "rules.toml").write_text(RULES)
    run = CliRunner().invoke
    options = ["--rules", str(tmp_path / "rules.toml")]
    done = run(app, ["import", str(tmp_path / "a.safetensors"), str(tmp_path / "run"), *options])
    assert done.exit_code == 0, done.output
    assert fs.open(tmp_path / "run").tensors["model.q"].shape == (3, 16, 5)
    done = run(app, ["export", str(tmp_path / "run"), str(tmp_path / "b"), *options, "--inverse"])
    assert done.exit_code == 0, done.output
    assert fs.diff(tmp_path / "a.safetensors", tmp_path / "b").equal
    import tomllib

    (tmp_path / "rules.json").write_text(json.dumps(tomllib.loads(RULES)))
    assert fs.read_rules(tmp_path / "rules.json").rules == fs.read_rules(tmp_path / "rules.toml").rules


@pytest.mark.parametrize(("text", "message"), [
    ("[[rules", "not a file of rules"), ("rules = 3", "no list of rules"), ("rulez = []", "no list of rules"),
    ('[[rules]]\nkind = "spin"', "rule 1 has no `kind`, or an unknown one"), ("[[rules]]\nkind = 3", "rule 1"),
    ('[[rules]]\nkind = "transpose"\nname = "a"\n[[rules]]\nkind = "rename"\nsource = "a"', "rule 2 lacks a field"),
    ('[[rules]]\nkind = "rename"\nsource = "a"\nto = "b"', "rule 1 has the unknown field 'to'"),
    ('[[rules]]\nkind = "split"\nsource = "a"\ntargets = ["b", "c"]\nparts = [1]', "rule 1: Split: parts"),
    ('[[rules]]\nkind = "split"\nsource = "a"\ntargets = ["b"]\nrequired = "no"', "rule 1: Split: required"),
    ('[[rules]]\nkind = "rename"\nsource = 3\ntarget = "b"', "rule 1"),
    ('[[rules]]\nkind = "rename"\nsource = "a"\ntarget = "b"\nrequired = "no"', "rule 1: required must be"),
    ('complete = "yes"\n[[rules]]\nkind = "transpose"\nname = "a"', "complete must be true or false, not 'yes'"),
])
def test_files_that_say_nothing_sensible_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(fs.ArgumentError, match=message):
        fs.read_rules(tmp_path / "rules.toml")


def test_a_file_that_is_not_there_is_an_error_of_the_verb(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3)}, tmp_path / "a.safetensors")
    done = CliRunner().invoke(
        app, ["import", str(tmp_path / "a.safetensors"), str(tmp_path / "run"), "--rules", "nowhere.toml"]
    )
    assert done.exit_code == 2
    assert "no ready rules are named 'nowhere.toml'" in done.output
