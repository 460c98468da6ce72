"""A training by TRL, as a process of its own: `python trl_act.py '{"out": "runs/x", "kind": "sft", ...}'`.

kind     "sft": SFTTrainer; "peft": the same, of adapters alone; "dpo": DPOTrainer, whose reference model follows
         the trained one; "grpo": GRPOTrainer, which samples what it is trained on
others   as of trainer_act.py

What it ends with goes to out.json, as there; with the reference model, where there is one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from digests import digest
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_act import RANK, STEPS, Draws, Killed, ended, small_gpt
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from flowstone.adapters.huggingface import get_last_checkpoint, use_flowstone

WORDS = [f"w{number}" for number in range(61)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Of 64 words, as the model has them."""
    ids = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def said(rows: int, seed: int) -> list[str]:
    """Texts of 2 to 4 words."""
    noise = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, len(WORDS), (2 + row % 3,), generator=noise).tolist() for row in range(rows)]
    return [" ".join(WORDS[item] for item in row) for row in drawn]


def odd_words(completions: list[str], **_: Any) -> list[float]:
    return [sum(word.endswith(("1", "3", "7")) for word in completion.split()) / 4 for completion in completions]


def data_of(kind: str) -> Dataset:
    prompts = said(48, 1)
    if kind == "dpo":
        return Dataset.from_dict({"prompt": prompts, "chosen": said(48, 2), "rejected": said(48, 3)})
    return Dataset.from_dict({"prompt" if kind == "grpo" else "text": prompts})


def made_trainer(kind: str, out: Path, callbacks: list[TrainerCallback], given: dict[str, Any]) -> Trainer:
    """With a model of a configuration: nothing is downloaded."""
    settings = {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "save_steps": 5, "logging_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True, "bf16": False,
        "restore_callback_states_from_checkpoint": True, "gradient_checkpointing": False, **given,
    }
    parts: dict[str, Any] = {
        "model": small_gpt(), "processing_class": tokenizer(), "callbacks": [Draws(), *callbacks],
        "train_dataset": data_of(kind),
    }
    if kind == "dpo":
        args = DPOConfig(**settings, max_length=8, sync_ref_model=True, ref_model_sync_steps=2)
        return DPOTrainer(ref_model=small_gpt(), args=args, **parts)
    if kind == "grpo":
        args = GRPOConfig(**settings, num_generations=2, max_completion_length=4)
        return GRPOTrainer(reward_funcs=odd_words, args=args, **parts)
    if kind == "peft":
        from peft import LoraConfig

        parts["peft_config"] = LoraConfig(target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    return SFTTrainer(args=SFTConfig(**settings, max_length=8), **parts)


def main() -> None:
    record = json.loads(sys.argv[1])
    out = Path(record["out"])
    torch.set_num_threads(1)
    callbacks: list[TrainerCallback] = [Killed(out, record["kill_at"])] if record.get("kill_at") else []
    trainer = made_trainer(record["kind"], out, callbacks, record.get("args", {}))
    if record.get("resume"):  # nothing of this may be left after a load
        for parameter in trainer.model.parameters():
            parameter.data.fill_(9) if parameter.requires_grad else None
    if record.get("flowstone", True):
        trainer = use_flowstone(trainer)
    resume = record.get("resume")
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out) if resume == "last" else resume)
    result = ended(trainer)
    reference = getattr(trainer, "ref_model", None)
    result["reference"] = None if reference is None else digest(reference.state_dict())
    Path(f"{out}-{RANK}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process


if __name__ == "__main__":
    main()
