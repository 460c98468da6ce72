"""`use_flowstone`: the one line that a script changes; and where a run left off."""

from __future__ import annotations

import os
from typing import Literal, TypeVar

from flowstone.adapters.framework import Framework
from flowstone.adapters.huggingface.options import Options
from flowstone.arguments import shown
from flowstone.checkpoint import open_checkpoint
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError, NoCheckpointError, NotAStoreError
from flowstone.events import OnEvent

TRANSFORMERS = Framework("transformers", "transformers accelerate", ("5.23.0",))

T = TypeVar("T")


def use_flowstone(
    trainer: T,
    *,
    budget_bytes: int | None = None,
    on_error: Literal["raise", "continue"] = "raise",
    max_unsaved_steps: int | None = None,
    engine: EngineOptions | None = None,
    on_event: OnEvent | None = None,
) -> T:
    """Make a `transformers.Trainer` save and resume through Flowstone, from now on; returns the same object.

    Its `output_dir` becomes the store. `save_strategy`, `save_total_limit`, `load_best_model_at_end`,
    `save_only_model` and `resume_from_checkpoint` mean what they mean without it. A save returns once its capture is
    scheduled; the end of `train()` waits for the last commit, and raises what went wrong. The other arguments are those
    of a Checkpointer. On several ranks, every rank calls this.

    raises  FrameworkError  transformers is not installed, or has an unknown interface
            ArgumentError   this is no Trainer, or one that saves in a way that Flowstone does not replace
    """
    options = Options(budget_bytes, on_error, max_unsaved_steps, engine, on_event)
    module = TRANSFORMERS.load("transformers")
    if isinstance(trainer, module.Trainer):
        from flowstone.adapters.huggingface.trainer import METHODS, adopt

        TRANSFORMERS.check(module.__version__, METHODS, module.Trainer)
        return adopt(trainer, options)
    raise ArgumentError(
        f"{shown(trainer)} is no Trainer", next="write trainer = use_flowstone(Trainer(model=model, args=args, ...))"
    )


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The path of the newest committed checkpoint in `folder`, for `resume_from_checkpoint`; None if there is none.

    Stands where `transformers.trainer_utils.get_last_checkpoint` does. A folder that only holds checkpoints which the
    Trainer has written by itself gives the newest of those.
    """
    try:
        return open_checkpoint(folder).path
    except (NoCheckpointError, NotAStoreError):
        if not os.path.isdir(folder):
            return None
        found: str | None = TRANSFORMERS.load("transformers.trainer_utils").get_last_checkpoint(os.fspath(folder))
        return found
