"""Samples of docs/TRANSFORMERS.md, run in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import samples

import flowstone as fs

transformers = pytest.importorskip("transformers", reason="`make test-integrations` installs it")

from accelerate import Accelerator  # noqa: E402
from trainer_act import Text, small_gpt  # noqa: E402  (it imports transformers)

from flowstone.adapters.huggingface import get_last_checkpoint, use_flowstone  # noqa: E402

SAMPLES = samples("TRANSFORMERS.md")


def run(names: list[str], given: dict[str, Any]) -> None:
    for name in names:
        exec(compile(SAMPLES[name], name, "exec"), given)


def test_each_sample_is_run() -> None:
    assert SAMPLES.keys() == {
        "trainer", "trainer-reads", "trainer-exported", "trl", "accelerate", "accelerate-reads", "peft"
    }


def test_the_trainer_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(7)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=64, n_head=2, vocab_size=64, n_positions=8, bos_token_id=1, eos_token_id=2
    )
    args = transformers.TrainingArguments(
        "runs/gpt", max_steps=5, save_steps=5, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    run(["trainer", "trainer-reads", "trainer-exported"], {
        "Trainer": transformers.Trainer, "model": transformers.GPT2LMHeadModel(config), "args": args, "data": Text(48),
        "held_out": Text(8), "use_flowstone": use_flowstone, "get_last_checkpoint": get_last_checkpoint, "fs": fs,
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM, "torch": torch,
    })


def test_the_sft_trainer_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl", reason="`make test-integrations` installs it")
    from trl_act import data_of, tokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    args = trl.SFTConfig("runs/sft", max_steps=2, save_steps=2, use_cpu=True, report_to=[], bf16=False)
    run(["trl"], {
        "SFTTrainer": trl.SFTTrainer, "model": small_gpt(), "args": args, "data": data_of("sft"),
        "tokenizer": tokenizer(), "use_flowstone": use_flowstone, "get_last_checkpoint": get_last_checkpoint,
    })
    assert fs.open("runs/sft").step == 2


def test_the_accelerator_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    given: dict[str, Any] = {
        "Accelerator": Accelerator, "model": model, "optimizer": optimizer, "fs": fs, "use_flowstone": use_flowstone,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "get_last_checkpoint": get_last_checkpoint,
        "loader": torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4),
    }

    def train_step(step: int) -> None:
        given["accelerator"].backward(given["model"](torch.randn(4, 8)).sum())
        given["optimizer"].step()
        given["scheduler"].step()
        given["optimizer"].zero_grad()

    given["train_step"] = train_step
    run(["accelerate", "accelerate-reads"], given)


def test_the_adapters_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft", reason="`make test-integrations` installs it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    args = transformers.TrainingArguments("runs/adapters", max_steps=2, save_steps=2, use_cpu=True, report_to=[])
    run(["peft"], {
        "Trainer": transformers.Trainer, "get_peft_model": peft.get_peft_model, "LoraConfig": peft.LoraConfig, "fs": fs,
        "base": small_gpt(), "args": args, "data": Text(48), "use_flowstone": use_flowstone,
    })
