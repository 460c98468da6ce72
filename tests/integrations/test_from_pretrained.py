"""`from_pretrained` loads an export by `flowstone export --to hf`, and files of `save_pretrained` are imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import flowstone as fs

transformers = pytest.importorskip("transformers", reason="`make test-integrations` installs it")


def models() -> dict[str, tuple[type, object]]:
    return {
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(
            n_layer=2, n_embd=64, n_head=2, vocab_size=512, n_positions=16)),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=512)),
    }


def same(module: torch.nn.Module, other: torch.nn.Module) -> bool:
    a, b = module.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("shard_bytes", [5e9, 2e5])
def test_a_trained_model_is_loaded_by_from_pretrained(tmp_path: Path, name: str, shard_bytes: float) -> None:
    kind, config = models()[name]
    model = kind(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 512, (2, 16))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    config.save_pretrained(tmp_path / "config")
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer, "step": 1})
    fs.export(tmp_path / "run", tmp_path / "hf", documents=tmp_path / "config", shard_bytes=shard_bytes)
    loaded, loading_info = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    assert same(loaded, model)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_save_pretrained_wrote_comes_in_and_goes_out_again(tmp_path: Path, name: str) -> None:
    kind, config = models()[name]
    model = kind(config)
    model.save_pretrained(tmp_path / "a", max_shard_size="200KB")
    fs.import_checkpoint(tmp_path / "a", tmp_path / "run")
    fs.export(tmp_path / "run", tmp_path / "b", shard_bytes=2e5)
    assert same(kind.from_pretrained(tmp_path / "b"), model)
    half = fs.export(tmp_path / "run", tmp_path / "c", dtype="bf16")
    assert half.cast
    loaded = kind.from_pretrained(tmp_path / "c", dtype=torch.bfloat16)
    expected = {key: raw.to(torch.bfloat16) for key, raw in model.state_dict().items() if raw.is_floating_point()}
    assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in expected.items())


def rearranged_models() -> dict[str, tuple[type, object, str, dict[str, int]]]:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
             "num_key_value_heads": 2, "vocab_size": 500}
    return {
        **{name: (*models()[name], name, {}) for name in ("gpt2", "llama")},
        "llama-tied": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**small, tie_word_embeddings=True),
                       "llama", {"padded_vocabulary": 512}),
        "llama-biased": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**small, attention_bias=True), "llama",
                         {}),
        "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig(**small, num_local_experts=3),
                    "mixtral", {}),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-tied", "llama-biased", "mixtral"])
def test_a_model_goes_to_megatrons_layout_and_back(tmp_path: Path, name: str) -> None:
    kind, config, rules, sizes = rearranged_models()[name]
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():  # biases and norms begin as zeros and ones
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "a", max_shard_size="100KB")
    known = json.loads((tmp_path / "a" / "config.json").read_text())
    report = fs.import_checkpoint(
        tmp_path / "a", tmp_path / "run", rules=fs.ready_rules(f"{rules}-to-megatron", known, **sizes)
    )
    assert all(key.startswith(("model.decoder.", "model.embedding.", "model.output_layer.")) for key in report.tensors)
    attention = fs.open(tmp_path / "run").tensors["model.decoder.layers.1.self_attention.linear_qkv.weight"]
    groups = getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert attention.shape == (64 + 2 * 64 * groups // config.num_attention_heads, 64)
    back = fs.ready_rules(f"megatron-to-{rules}", known, **sizes)
    fs.export(tmp_path / "run", tmp_path / "b", rules=back)  # with the documents that the import has kept
    assert fs.diff(tmp_path / "a", tmp_path / "b").equal
    loaded = kind.from_pretrained(tmp_path / "b").eval()
    assert same(loaded, model)
    tokens = torch.randint(0, 500, (2, 16))
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
