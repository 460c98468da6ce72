"""`use_flowstone`, the only line of a script that has to change; and `get_last_checkpoint`."""

from __future__ import annotations

import os
import sys
from typing import Literal, TypeVar

from flowstone.adapters.framework import SupportedFramework
from flowstone.adapters.huggingface import accelerator as over_accelerator
from flowstone.adapters.huggingface import trainer as over_trainer
from flowstone.adapters.huggingface.options import CheckpointerOptions
from flowstone.adapters.huggingface.store_paths import (
    committed_at,
    newest_trainer_checkpoint,
    warn_of_later_trainer_checkpoint,
)
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError
from flowstone.events.phases import OnEvent
from flowstone.stores.arguments import shown

ACCELERATE = SupportedFramework("accelerate", "accelerate", ("1.15.0",))
TRANSFORMERS = SupportedFramework("transformers", "transformers", ("5.23.0",))

accelerate = ACCELERATE.load("accelerate")  # transformers' Trainer and PEFT require accelerate

T = TypeVar("T")


def use_flowstone(
    host: T,
    /,
    *,
    budget_bytes: int | None = None,
    on_error: Literal["raise", "continue"] = "raise",
    max_unsaved_steps: int | None = None,
    engine: EngineOptions | None = None,
    on_event: OnEvent | None = None,
) -> T:
    """Make a transformers `Trainer`, or an `Accelerator`, save and load through Flowstone; returns the same object.

    A Trainer's `output_dir` becomes the store. `save_strategy`, `save_total_limit`, `load_best_model_at_end`,
    `save_only_model` and `resume_from_checkpoint` keep their meaning. A save returns once its capture is scheduled;
    the end of `train()` waits for the last commit, and raises its error.

    `accelerator.save_state("runs/gpt/step_100")` saves step 100 into the store `runs/gpt`, and `load_state` with the
    same path loads it. `end_training()`, or the end of the process, waits for the last commit.

    The other arguments are those of a Checkpointer. On several ranks, every rank calls this.

    raises  FrameworkError  the framework has an unknown interface; the error names the differences, and the known
                            versions
            ArgumentError   `host` is neither Trainer nor Accelerator, or saves in a way that Flowstone does not support
    """
    options = CheckpointerOptions(budget_bytes, on_error, max_unsaved_steps, engine, on_event)
    if isinstance(host, accelerate.Accelerator):
        ACCELERATE.check(accelerate.__version__, over_accelerator.METHODS, accelerate.Accelerator)
        return over_accelerator.adopt(host, options)
    transformers = sys.modules.get("transformers")  # if transformers is not imported, this is not a Trainer
    if transformers is not None and isinstance(host, transformers.Trainer):
        TRANSFORMERS.check(transformers.__version__, over_trainer.METHODS, transformers.Trainer)
        return over_trainer.adopt(host, options)
    raise ArgumentError(
        f"{shown(host)} is neither a Trainer nor an Accelerator",
        next="write trainer = use_flowstone(Trainer(model=model, args=args, ...)), or use_flowstone(Accelerator())",
    )


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The path of the newest committed checkpoint in `folder`, for `resume_from_checkpoint`; None if there is none.

    Use it instead of `transformers.trainer_utils.get_last_checkpoint`. If the folder has only checkpoints that a
    Trainer wrote without Flowstone, the newest of these is returned.
    """
    newest = committed_at(folder)
    if newest is None:
        return newest_trainer_checkpoint(folder)
    warn_of_later_trainer_checkpoint(newest, folder)
    return newest.path
