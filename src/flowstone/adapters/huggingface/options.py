"""The options that adapters pass on to the Checkpointers that they create."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from flowstone.checkpointer import Checkpointer
from flowstone.config import EngineOptions, Keep, KeepRule
from flowstone.events.phases import OnEvent


@dataclass(frozen=True, slots=True)
class CheckpointerOptions:
    """Arguments of a Checkpointer, with the same meaning."""

    budget_bytes: int | None = None
    on_error: Literal["raise", "continue"] = "raise"
    max_unsaved_steps: int | None = None
    engine: EngineOptions | None = None
    on_event: OnEvent | None = None

    def open(self, path: str | os.PathLike[str], keep: Keep | KeepRule | None = None) -> Checkpointer:
        return Checkpointer(
            path, keep=keep, budget_bytes=self.budget_bytes, on_error=self.on_error,
            max_unsaved_steps=self.max_unsaved_steps, engine=self.engine, on_event=self.on_event,
        )
