"""A training by transformers' Trainer, as a process of its own: `python trainer_act.py '{"out": "runs/x", ...}'`.

out          the output directory
flowstone    whether use_flowstone takes over
resume       what `resume_from_checkpoint` is; "last": get_last_checkpoint
kill_at      the step at which the process ends by SIGKILL, once there is something to resume from
full_at      the step from which on no file can become longer than 1 MiB
adapters     whether the model is a PEFT model, of which only adapters are trained
args         further TrainingArguments

What it ends with goes to out.json: digests of weights, optimizer, scheduler and generators, and the whole log.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digests import digest
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from flowstone.adapters.huggingface import get_last_checkpoint, use_flowstone

RANK = int(os.environ.get("RANK", "0"))
STEPS = 30


class Text(torch.utils.data.Dataset):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def small_gpt(width: int = 160) -> GPT2LMHeadModel:
    """With layers of more than 64 KiB, which are captured while training goes on, and with dropout."""
    torch.manual_seed(7)
    config = GPT2Config(
        n_layer=2, n_embd=width, n_head=2, vocab_size=64, n_positions=8, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config)


def with_adapters(seed: int = 7, name: str = "tiny/base", **given: Any) -> Any:
    """Over a base of 700 KiB."""
    from peft import LoraConfig, get_peft_model

    base = small_gpt()
    torch.manual_seed(seed)
    for parameter in base.parameters():
        parameter.data.normal_(std=0.02)
    base.config._name_or_path = base.name_or_path = name
    config = LoraConfig(**{"r": 8, "target_modules": ["c_attn"], "lora_dropout": 0.1, "fan_in_fan_out": True, **given})
    torch.manual_seed(8)
    return get_peft_model(base, config)


class Draws(TrainerCallback, ExportableState):
    """Has a state, and uses python's and numpy's generators, so that both must be brought back."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.drawn = [*self.drawn[-3:], random.random() + np.random.random()]

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"drawn": self.drawn}}


class Full(TrainerCallback):
    def __init__(self, out: Path, step: int) -> None:
        self.out, self.step = out, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == self.step:
            while self.step and not list(self.out.glob("step-*/manifest.json")):
                time.sleep(0.01)  # what was begun before has room
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))


class Killed(TrainerCallback):
    def __init__(self, out: Path, step: int) -> None:
        self.out, self.step = out, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == self.step:
            while not list(self.out.glob("step-*/manifest.json")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def made_trainer(out: Path, callbacks: list[TrainerCallback], model: Any = None, **given: Any) -> Trainer:
    args = TrainingArguments(**{
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "save_steps": 5, "logging_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "restore_callback_states_from_checkpoint": True, **given,
    })
    return Trainer(
        model=small_gpt() if model is None else model, args=args, train_dataset=Text(48), eval_dataset=Text(8),
        callbacks=[Draws(), *callbacks],
    )


def ended(trainer: Trainer) -> dict[str, Any]:
    timed = ("_runtime", "_per_second", "train_loss", "total_flos")  # of one call of train(), also without Flowstone
    return {
        "model": digest(trainer.model.state_dict()), "optimizer": digest(trainer.optimizer.state_dict()),
        "scheduler": digest(trainer.lr_scheduler.state_dict()),
        "generators": digest([torch.get_rng_state(), random.getstate(), np.random.get_state()]),
        "log": [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in trainer.state.log_history],
        "drawn": next(callback.drawn for callback in trainer.callback_handler.callbacks if isinstance(callback, Draws)),
        "best": trainer.state.best_global_step, "flos": trainer.state.total_flos,
    }


def main() -> None:
    row = json.loads(sys.argv[1])
    out = Path(row["out"])
    torch.set_num_threads(1)
    callbacks: list[TrainerCallback] = [Killed(out, row["kill_at"])] if row.get("kill_at") else []
    callbacks += [Full(out, row["full_at"])] if "full_at" in row else []
    trainer = made_trainer(out, callbacks, with_adapters() if row.get("adapters") else None, **row.get("args", {}))
    if row.get("resume"):  # nothing of this may be left after a load
        for parameter in trainer.model.parameters():
            parameter.data.fill_(9) if parameter.requires_grad else None
    if row.get("flowstone", True):
        trainer = use_flowstone(trainer)
    resume = row.get("resume")
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out) if resume == "last" else resume)
    Path(f"{out}-{RANK}.json").write_text(json.dumps(ended(trainer)))
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process


if __name__ == "__main__":
    main()
