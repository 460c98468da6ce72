"""`use_flowstone`: the one line that a script changes; and where a run left off."""

from __future__ import annotations

import os
import sys
from typing import Literal, TypeVar

from flowstone.adapters.framework import Framework
from flowstone.adapters.huggingface import accelerator as over_accelerator
from flowstone.adapters.huggingface import trainer as over_trainer
from flowstone.adapters.huggingface.options import Options
from flowstone.adapters.huggingface.places import committed_at, own_newest, tell_of_later_own
from flowstone.arguments import shown
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError
from flowstone.events import OnEvent

ACCELERATE = Framework("accelerate", "accelerate", ("1.15.0",))
TRANSFORMERS = Framework("transformers", "transformers", ("5.23.0",))

accelerate = ACCELERATE.load("accelerate")  # transformers' Trainer and PEFT need it, too

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
    `save_only_model` and `resume_from_checkpoint` mean what they mean without Flowstone. A save returns once its
    capture is scheduled; the end of `train()` waits for the last commit, and raises what went wrong.

    `accelerator.save_state("runs/gpt/step_100")` saves step 100 into the store `runs/gpt`, and `load_state` with the
    same path loads it. `end_training()`, or else the end of the process, waits for the last commit.

    The other arguments are those of a Checkpointer. On several ranks, every rank calls this.

    raises  FrameworkError  of an unknown interface: names what differs, and the versions that are known
            ArgumentError   this is neither, or it saves in a way that Flowstone does not replace
    """
    options = Options(budget_bytes, on_error, max_unsaved_steps, engine, on_event)
    if isinstance(host, accelerate.Accelerator):
        ACCELERATE.check(accelerate.__version__, over_accelerator.METHODS, accelerate.Accelerator)
        return over_accelerator.adopt(host, options)
    transformers = sys.modules.get("transformers")  # without it this is no Trainer
    if transformers is not None and isinstance(host, transformers.Trainer):
        TRANSFORMERS.check(transformers.__version__, over_trainer.METHODS, transformers.Trainer)
        return over_trainer.adopt(host, options)
    raise ArgumentError(
        f"{shown(host)} is neither a Trainer nor an Accelerator",
        next="write trainer = use_flowstone(Trainer(model=model, args=args, ...)), or use_flowstone(Accelerator())",
    )


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The path of the newest committed checkpoint in `folder`, for `resume_from_checkpoint`; None if there is none.

    Stands where `transformers.trainer_utils.get_last_checkpoint` does. A folder that only holds checkpoints which a
    Trainer has written without Flowstone gives the newest of those.
    """
    newest = committed_at(folder)
    if newest is None:
        return own_newest(folder)
    tell_of_later_own(newest, folder)
    return newest.path
