"""The sections (named top-level values) of a Trainer's checkpoint."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from flowstone.adapters.huggingface.documents import ModelDocuments
from flowstone.adapters.huggingface.peft_adapters import BaseModels, to_save
from flowstone.state import PerRank
from flowstone.state.kinds.generator import rng

TRAINER_STATE = "trainer_state"


def live_sections(trainer: Any, bases: BaseModels, *, model_only: bool = False) -> dict[str, object]:
    """The sections that a load restores into the Trainer's objects. Random generators are left out, as the Trainer
    loads these last.
    """
    sections = bases.sections(trainer.model)
    if model_only:
        return sections
    sections |= {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None:
        sections["scaler"] = scaler
    if getattr(trainer.args, "sync_ref_model", False) and getattr(trainer, "ref_model", None) is not None:
        sections["ref_model"] = trainer.ref_model  # TRL's reference model, which TRL itself does not save
    return sections


def saved_sections(trainer: Any, bases: BaseModels, documents: ModelDocuments) -> dict[str, object]:
    model_only, is_first = bool(trainer.args.save_only_model), trainer.is_world_process_zero()
    sections = to_save(live_sections(trainer, bases, model_only=model_only))
    if not model_only:
        sections["rng"] = rng()
    sections |= documents.sections(trainer.model, _processing(trainer), is_first=is_first)
    return sections | {TRAINER_STATE: PerRank(_trainer_state(trainer) if is_first else None)}


def _processing(trainer: Any) -> object:
    """The tokenizer or processor that the Trainer itself would save."""
    given = trainer.processing_class
    return getattr(trainer.data_collator, "tokenizer", None) if given is None else given


def _trainer_state(trainer: Any) -> dict[str, object]:
    """The content of trainer_state.json, from rank 0, since each rank logs its own durations of evaluations."""
    from transformers.trainer_callback import ExportableState

    state = trainer.state
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    exportable = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    state.stateful_callbacks = type(state)(stateful_callbacks=exportable).stateful_callbacks
    content: dict[str, object] = json.loads(json.dumps(dataclasses.asdict(state)))
    return content
