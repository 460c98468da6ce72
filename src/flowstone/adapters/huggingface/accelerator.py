"""Accelerate's Accelerator: `save_state` and `load_state` over Flowstone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from flowstone.adapters.deriving import derive
from flowstone.adapters.huggingface.distributed import check_distributed
from flowstone.adapters.huggingface.documents import Documents
from flowstone.adapters.huggingface.options import Options
from flowstone.adapters.huggingface.peft_adapters import Bases, to_load, to_save
from flowstone.adapters.huggingface.places import Place, checkpoint_at, place_of, store_of
from flowstone.checkpoint import Checkpoint
from flowstone.checkpointer import Checkpointer
from flowstone.commit.entries import step_directory
from flowstone.config import Keep
from flowstone.errors import ArgumentError, NoCheckpointError
from flowstone.state import PerRank, rng

METHODS: Mapping[str, Sequence[str]] = MappingProxyType({
    "save_state": ("output_dir", "safe_serialization"), "load_state": ("input_dir", "load_kwargs"), "end_training": (),
})
"""What is replaced of the Accelerator."""

T = TypeVar("T")


def adopt(accelerator: T, options: Options) -> T:
    """Replace how `accelerator` saves and loads: its class becomes one that derives from its own."""
    from accelerate import Accelerator

    check_distributed(accelerator)
    derive(accelerator, AcceleratorCheckpoints, Accelerator)
    accelerator._flowstone = Stores(options)  # type: ignore[attr-defined]
    return accelerator


class AcceleratorCheckpoints:
    """The Accelerator's own methods, which call its own again for what it has saved without Flowstone."""

    _flowstone: Stores

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        accelerator: Any = self
        _refuse("save_state", save_model_func_kwargs)
        _refuse_hooks("register_save_state_pre_hook", accelerator._save_model_state_pre_hook, "write")
        configuration = accelerator.project_configuration
        if configuration.automatic_checkpoint_naming:
            place = Place(_named_by_itself(accelerator), accelerator.save_iteration)
        elif output_dir is None:
            raise ArgumentError("save_state needs a directory", next='write save_state(f"runs/gpt/step_{step}")')
        else:
            place = place_of(output_dir)
        limit = configuration.total_limit if configuration.automatic_checkpoint_naming else None
        sections = _sections(accelerator, self._flowstone.bases) | _documents(accelerator, self._flowstone.documents)
        path = self._flowstone.save(place, sections, limit)
        configuration.iteration += 1
        return path

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        accelerator: Any = self
        automatic = accelerator.project_configuration.automatic_checkpoint_naming
        path = _named_by_itself(accelerator) if input_dir is None and automatic else input_dir
        found = None if path is None else self._flowstone.find(path)
        if found is None:
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)  # type: ignore[misc]
            return
        given = {key: value for key, value in load_model_func_kwargs.items() if key != "map_location"}
        _refuse("load_state", {**(load_kwargs or {}), **given})
        _refuse_hooks("register_load_state_pre_hook", accelerator._load_model_state_pre_hook, "read")
        sections = _sections(accelerator, self._flowstone.bases)
        self._flowstone.load(found, sections)
        counted: Any = sections["accelerator"]
        accelerator.step = counted["step"]
        if automatic:
            accelerator.project_configuration.iteration = found.step + 1

    def end_training(self) -> None:
        self._flowstone.close()
        super().end_training()  # type: ignore[misc]


class Stores:
    """The store that an Accelerator saves into, with the Checkpointer that it keeps for that.

    bases         what the adapters of PEFT models belong to
    documents     the model's configuration
    newest        the newest step in it; None before the first
    rewind_above  the step that the job has gone back to: newer ones are set aside before the next save
    """

    def __init__(self, options: Options) -> None:
        self._options, self.bases, self.documents = options, Bases(), Documents()
        self._path: str | None = None
        self._keep: Keep | None = None
        self._checkpointer: Checkpointer | None = None
        self._newest: int | None = None
        self._rewind_above: int | None = None

    def save(self, place: Place, sections: Mapping[str, object], limit: int | None) -> Path:
        """Save into the place; where it says no step, as the one after the newest, which is all that stays."""
        if place.step is None:
            limit = 1
        checkpointer = self._at(place.store, Keep(last=limit) if limit else None)
        if self._rewind_above is not None:
            checkpointer.rewind(self._rewind_above)
            self._newest, self._rewind_above = self._rewind_above, None
        step = (0 if self._newest is None else self._newest + 1) if place.step is None else place.step
        checkpointer.save(step, to_save(sections))
        self._newest = step
        return Path(place.store, step_directory(step))

    def find(self, path: str | os.PathLike[str]) -> Checkpoint | None:
        """The checkpoint of ours that `path` means, once saves have ended; None for one that Accelerate has written.

        raises  NoCheckpointError for neither
        """
        if self._checkpointer is not None:
            self._checkpointer.wait()
        found = checkpoint_at(path)
        if found is None and not os.path.isdir(os.path.expanduser(path)):
            raise NoCheckpointError(
                f"there is no checkpoint {os.fspath(path)}",
                next="get_last_checkpoint(folder) gives the newest one, None if there is none",
            )
        return found

    def load(self, found: Checkpoint, sections: Mapping[str, object]) -> None:
        store = store_of(found)
        checkpointer = self._at(store, self._keep if store == self._path else None)
        checkpointer.load(to_load(sections, found), step=found.step)
        self._rewind_above = found.step if self._newest is not None and self._newest > found.step else None

    def close(self) -> None:
        """Wait for the last commit. Raises what went wrong."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def _at(self, store: str, keep: Keep | None) -> Checkpointer:
        if self._checkpointer is None or (self._path, self._keep) != (store, keep):
            self.close()
            self._checkpointer = self._options.open(store, keep)
            if self._path != store:
                self._rewind_above = None
            self._path, self._keep = store, keep
            newest = self._checkpointer.latest()
            self._newest = None if newest is None else newest.step
        return self._checkpointer


def _sections(accelerator: Any, bases: Bases) -> dict[str, object]:
    """What `save_state` saves; of several models, the second is `model_1`, as Accelerate's files are called."""
    if not accelerator._models and not accelerator._optimizers:
        raise ArgumentError(
            "the accelerator has no model and no optimizer", next="call accelerator.prepare(...) before this"
        )
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


def _documents(accelerator: Any, documents: Documents) -> dict[str, object]:
    """The documents of the one model; several would need several, and an export knows one."""
    if len(accelerator._models) != 1:
        return {}
    return documents.sections(accelerator._models[0], None, is_first=accelerator.is_main_process)


def _named_by_itself(accelerator: Any) -> str:
    return os.path.abspath(os.path.join(accelerator.project_dir, "checkpoints"))


def _refuse(call: str, given: Mapping[str, object]) -> None:
    if given:
        raise ArgumentError(
            f"{call} through Flowstone takes no {', '.join(given)}", next="leave it out; loads are strict"
        )


def _refuse_hooks(registered_by: str, hooks: Mapping[int, object], verb: str) -> None:
    if hooks:
        raise ArgumentError(
            f"hooks of {registered_by} {verb} files of their own, which no commit contains",
            next="remove the hooks, or leave how this Accelerator saves and loads as it is",
        )
