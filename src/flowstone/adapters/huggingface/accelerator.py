"""Accelerate's Accelerator: `save_state` and `load_state` through Flowstone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from flowstone.adapters.class_override import override_methods
from flowstone.adapters.huggingface.distributed import check_distributed
from flowstone.adapters.huggingface.documents import ModelDocuments
from flowstone.adapters.huggingface.options import CheckpointerOptions
from flowstone.adapters.huggingface.peft_adapters import BaseModels, to_load, to_save
from flowstone.adapters.huggingface.store_paths import StoreStep, checkpoint_at, store_of, store_step_of
from flowstone.checkpointer import Checkpointer
from flowstone.commit.entries import step_directory
from flowstone.config import Keep
from flowstone.errors import ArgumentError, NoCheckpointError
from flowstone.reading.checkpoint import Checkpoint
from flowstone.state import PerRank
from flowstone.state.kinds.generator import rng

METHODS: Mapping[str, Sequence[str]] = MappingProxyType({
    "save_state": ("output_dir", "safe_serialization"), "load_state": ("input_dir", "load_kwargs"), "end_training": (),
})
"""The methods of the Accelerator that are replaced."""

T = TypeVar("T")


def adopt(accelerator: T, options: CheckpointerOptions) -> T:
    """Replace how `accelerator` saves and loads: its class is replaced by a subclass. Returns the same object."""
    from accelerate import Accelerator

    check_distributed(accelerator)
    override_methods(accelerator, AcceleratorCheckpoints, Accelerator, AcceleratorStore(options))
    return accelerator


class AcceleratorCheckpoints:
    """Methods for an Accelerator. For checkpoints that were saved without Flowstone, they call the original methods."""

    _flowstone: AcceleratorStore

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        accelerator: Any = self
        _refuse("save_state", save_model_func_kwargs)
        _refuse_hooks("register_save_state_pre_hook", accelerator._save_model_state_pre_hook, "write")
        configuration = accelerator.project_configuration
        if configuration.automatic_checkpoint_naming:
            place = StoreStep(_automatic_folder(accelerator), accelerator.save_iteration)
        elif output_dir is None:
            raise ArgumentError("save_state needs a directory", next='write save_state(f"runs/gpt/step_{step}")')
        else:
            place = store_step_of(output_dir)
        limit = configuration.total_limit if configuration.automatic_checkpoint_naming else None
        sections = _sections(accelerator, self._flowstone.bases) | _documents(accelerator, self._flowstone.documents)
        path = self._flowstone.save(place, sections, limit)
        configuration.iteration += 1
        return path

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        accelerator: Any = self
        automatic = accelerator.project_configuration.automatic_checkpoint_naming
        path = _automatic_folder(accelerator) if input_dir is None and automatic else input_dir
        checkpoint = None if path is None else self._flowstone.find(path)
        if checkpoint is None:
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)  # type: ignore[misc]
            return
        given = {key: value for key, value in load_model_func_kwargs.items() if key != "map_location"}
        _refuse("load_state", {**(load_kwargs or {}), **given})
        _refuse_hooks("register_load_state_pre_hook", accelerator._load_model_state_pre_hook, "read")
        sections = _sections(accelerator, self._flowstone.bases)
        self._flowstone.load(checkpoint, sections)
        counted: Any = sections["accelerator"]
        accelerator.step = counted["step"]
        if automatic:
            accelerator.project_configuration.iteration = checkpoint.step + 1

    def end_training(self) -> None:
        self._flowstone.close()
        super().end_training()  # type: ignore[misc]


class AcceleratorStore:
    """The store that an Accelerator saves into, and its Checkpointer.

    bases      identifies the base models of PEFT adapters
    documents  the model's configuration
    """

    def __init__(self, options: CheckpointerOptions) -> None:
        self._options, self.bases, self.documents = options, BaseModels(), ModelDocuments()
        self._path: str | None = None
        self._keep: Keep | None = None
        self._checkpointer: Checkpointer | None = None
        self._newest: int | None = None  # the newest step in the store
        # the step to which the store was rewound last; the next save sets newer steps aside
        self._rewind_above: int | None = None

    def save(self, place: StoreStep, sections: Mapping[str, object], limit: int | None) -> Path:
        """Save into the store of `place`. If `place` has no step, the state becomes the step after the newest one, and
        only this new step is kept.
        """
        if place.step is None:
            limit = 1
        checkpointer = self._checkpointer_of(place.store, Keep(last=limit) if limit else None)
        if self._rewind_above is not None:
            checkpointer.rewind(self._rewind_above)
            self._newest, self._rewind_above = self._rewind_above, None
        step = (0 if self._newest is None else self._newest + 1) if place.step is None else place.step
        checkpointer.save(step, to_save(sections))
        self._newest = step
        return Path(place.store, step_directory(step))

    def find(self, path: str | os.PathLike[str]) -> Checkpoint | None:
        """Wait for saves, and return the Flowstone checkpoint at `path`. None if Accelerate itself wrote the
        checkpoint.

        raises  NoCheckpointError  `path` has no checkpoint
        """
        if self._checkpointer is not None:
            self._checkpointer.wait()
        checkpoint = checkpoint_at(path)
        if checkpoint is None and not os.path.isdir(os.path.expanduser(path)):
            raise NoCheckpointError(
                f"there is no checkpoint {os.fspath(path)}",
                next="call get_last_checkpoint(folder) to find the newest one",
            )
        return checkpoint

    def load(self, checkpoint: Checkpoint, sections: Mapping[str, object]) -> None:
        store = store_of(checkpoint)
        checkpointer = self._checkpointer_of(store, self._keep if store == self._path else None)
        checkpointer.load(to_load(sections, checkpoint), step=checkpoint.step)
        self._rewind_above = checkpoint.step if self._newest is not None and self._newest > checkpoint.step else None

    def close(self) -> None:
        """Wait for the last commit. Raises its error."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def _checkpointer_of(self, store: str, keep: Keep | None) -> Checkpointer:
        if self._checkpointer is None or (self._path, self._keep) != (store, keep):
            self.close()
            self._checkpointer = self._options.open(store, keep)
            if self._path != store:
                self._rewind_above = None
            self._path, self._keep = store, keep
            newest = self._checkpointer.latest()
            self._newest = None if newest is None else newest.step
        return self._checkpointer


def _sections(accelerator: Any, bases: BaseModels) -> dict[str, object]:
    """The sections for `save_state`. A second model is in the section `model_1`, as in Accelerate's file names."""
    if not accelerator._models and not accelerator._optimizers:
        raise ArgumentError("the accelerator has no model and no optimizer", next="call accelerator.prepare(...) first")
    kinds = {
        "optimizer": accelerator._optimizers, "scheduler": accelerator._schedulers,
        "registered": accelerator._custom_objects,
    }
    sections: dict[str, object] = {
        kind if i == 0 else f"{kind}_{i}": value for kind, values in kinds.items() for i, value in enumerate(values)
    }
    for i, model in enumerate(accelerator._models):
        sections |= bases.sections(model, i)
    loaders = {
        str(i): loader for i, loader in enumerate(accelerator._dataloaders)
        if getattr(loader, "use_stateful_dataloader", False)
    }
    if loaders:
        sections["dataloaders"] = PerRank(loaders)
    if accelerator.scaler is not None:
        sections["scaler"] = accelerator.scaler
    return sections | {"accelerator": {"step": accelerator.step}, "rng": rng()}


def _documents(accelerator: Any, documents: ModelDocuments) -> dict[str, object]:
    """The documents (configuration, tokenizer) of a single model. With several models there are none, as an export has
    only one model.
    """
    if len(accelerator._models) != 1:
        return {}
    return documents.sections(accelerator._models[0], None, is_first=accelerator.is_main_process)


def _automatic_folder(accelerator: Any) -> str:
    return os.path.abspath(os.path.join(accelerator.project_dir, "checkpoints"))


def _refuse(call: str, given: Mapping[str, object]) -> None:
    if given:
        raise ArgumentError(
            f"{call} does not support {', '.join(given)} with Flowstone",
            next="leave this out; Flowstone's loads are always strict",
        )


def _refuse_hooks(registered_by: str, hooks: Mapping[int, object], verb: str) -> None:
    if hooks:
        raise ArgumentError(
            f"hooks of {registered_by} {verb} their own files, which would not be part of the checkpoint",
            next="remove the hooks, or do not call use_flowstone for this Accelerator",
        )
