"""`flowstone_strategy`: sharded strategies that save and load through Flowstone."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import Module
from torch.optim import Optimizer

from flowstone.adapters.class_override import override_methods
from flowstone.adapters.dcp import FlowstoneReader
from flowstone.adapters.dcp.dcp_record import RECORD as DCP_RECORD
from flowstone.adapters.dcp.target import is_local
from flowstone.adapters.lightning.background import close_saves
from flowstone.adapters.lightning.checkpoint_io import SYNCHRONOUS_PREFIX, is_last, target_for
from flowstone.adapters.lightning.packages import sharded_strategies
from flowstone.adapters.lightning.reading import checkpoint_directory
from flowstone.adapters.lightning.sharded_saves import ShardedSaves, is_lightning_checkpoint
from flowstone.adapters.lightning.values import validated, values_of
from flowstone.adapters.outer_exception import OuterException
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError, MismatchError
from flowstone.reading.checkpoint import open_checkpoint
from flowstone.store.local import LocalStore
from flowstone.stores.arguments import shown
from flowstone.torch.fsdp2 import with_shards

T = TypeVar("T")

_MODEL = "state_dict"
"""The section of a Trainer's model; its optimizers are in optimizer_0, optimizer_1, ..."""


def flowstone_strategy(strategy: T, *, asynchronous: bool = True, engine: EngineOptions | None = None) -> T:
    """Make a sharded strategy save and load through Flowstone. Call this before the strategy is first used. Returns the
    same object.

    strategy      an FSDPStrategy(state_dict_type="sharded") or a ModelParallelStrategy, of a Trainer or of Fabric
    asynchronous  False: a save copies nothing, and returns once it is durable
    engine        options of the I/O engine

    Every rank writes its own part. A load may have another number of ranks than the save; each reads only the parts
    that it needs.

    raises  FrameworkError  Lightning is not installed, or has an unknown interface
            ArgumentError   the strategy is of another kind, or gathers the full state on rank 0
    """
    if engine is not None and not isinstance(engine, EngineOptions):
        raise ArgumentError(f"engine must be EngineOptions, got {engine!r:.60}", next="write fs.EngineOptions(...)")
    for kind, is_trainers in sharded_strategies():
        if isinstance(strategy, kind):
            _check_sharded(strategy)
            checkpoints = StrategyCheckpoints(asynchronous, engine or EngineOptions())
            override_methods(strategy, TrainerStrategy if is_trainers else FabricStrategy, kind, checkpoints)
            return strategy
    raise ArgumentError(
        f"{shown(strategy)} is not a sharded strategy",
        next="give a ModelParallelStrategy(...) or an FSDPStrategy(state_dict_type='sharded'); if each process has "
        "the full model, pass plugins=[FlowstoneIO()] instead",
    )


def _check_sharded(strategy: Any) -> None:
    if getattr(strategy, "_state_dict_type", "sharded") != "sharded":
        raise ArgumentError(
            f"{type(strategy).__name__} would gather the full state on rank 0",
            found=f"state_dict_type={strategy._state_dict_type!r}",
            next="pass state_dict_type='sharded' to the strategy",
        )
    if not getattr(strategy, "_save_distributed_checkpoint", True):
        raise ArgumentError(
            f"{type(strategy).__name__} would gather the full state on rank 0",
            found="save_distributed_checkpoint=False", next="leave save_distributed_checkpoint out",
        )


class StrategyCheckpoints:
    """The saves and loads of one strategy, shared by Trainer and Fabric."""

    def __init__(self, asynchronous: bool, engine: EngineOptions) -> None:
        self._asynchronous, self._engine = asynchronous, engine
        self._saves: ShardedSaves | None = None
        self._outer_exception = OuterException()

    def save(self, path: object, sharded: Mapping[str, Any], others: Mapping[str, Any], *, leads: bool) -> None:
        """Save sharded values and other values as one checkpoint. Rank 0 (`leads`) writes the other values."""
        target = target_for(others, path)

        def state() -> dict[str, Any]:
            return {**sharded, **(_leaves(others) if leads else {})}

        self._open_saves().save(
            target, state, keep_name=not is_last(others, target),
            in_background=self._asynchronous and not target.name.startswith(SYNCHRONOUS_PREFIX),
        )

    def load(
        self, path: Path, model: tuple[str, Module], optimizers: Mapping[str, Optimizer], *, strict: bool
    ) -> dict[str, Any]:
        """Load this rank's parts of a model and its optimizers, and verify them. Returns all other sections.

        raises  NoCheckpointError, NotAStoreError, DamagedError, MismatchError
        """
        place = checkpoint_directory(path)
        store = LocalStore(place, self._engine)
        try:
            checkpoint = open_checkpoint(store)
            missing = [key for key in (model[0], *optimizers) if key not in checkpoint.objects]
            if missing:
                raise MismatchError(
                    f"{place} has no section {missing[0]!r}", found=", ".join(sorted(checkpoint.objects)),
                    next="resume from a checkpoint with optimizers" if missing[0] in optimizers
                    else "give the keys that the checkpoint was saved with",
                )
            _load_parts(place, self._engine, model, optimizers, strict=strict)
            own = {model[0], *optimizers, DCP_RECORD}
            others = values_of(checkpoint, [key for key in checkpoint.objects if key not in own])
            return {key: leaf[0] if type(leaf) is tuple else leaf for key, leaf in others.items()}
        finally:
            store.close()

    def remove(self, path: Path, remove_others: Any) -> None:
        self._open_saves().remove(path, remove_others)

    def await_all(self) -> None:
        if self._saves is not None:
            self._saves.await_all()

    def wait(self) -> None:
        """Wait until all saves are durable. Raises SaveFailedError for a failure that was not raised yet."""
        if self._saves is not None:
            self._saves.wait()

    def close(self) -> None:
        """Wait for all saves, and release the memory. The next save allocates it again."""
        training_failed = self._outer_exception.training_has_failed()
        self._outer_exception = OuterException()  # the caller may train again in its except block
        saves, self._saves = self._saves, None
        if saves is not None:
            close_saves(saves, training_has_failed=training_failed)

    def _open_saves(self) -> ShardedSaves:
        if self._saves is None:
            self._saves = ShardedSaves(self._engine)
        return self._saves


class TrainerStrategy(ABC):  # like Lightning's classes, so that an object's class can be replaced by a subclass
    """Methods for a Trainer's strategy. Lightning's own methods still read Lightning's own checkpoints."""

    _flowstone: StrategyCheckpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: object = None) -> None:
        strategy: Any = self
        _refuse(storage_options)
        others = dict(checkpoint)
        sharded = {_MODEL: others.pop(_MODEL)}
        sharded |= {f"optimizer_{number}": state for number, state in enumerate(others.pop("optimizer_states", ()))}
        self._flowstone.save(strategy.broadcast(filepath), sharded, others, leads=strategy.global_rank == 0)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        strategy: Any = self
        path = _local(strategy.broadcast(checkpoint_path))
        self._flowstone.await_all()
        if path.is_file() or is_lightning_checkpoint(path):
            checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)  # type: ignore[misc]
            return checkpoint
        is_fitting = strategy.lightning_module.trainer.state.fn == "fit"
        present = strategy.optimizers if is_fitting else ()
        optimizers = {f"optimizer_{number}": optimizer for number, optimizer in enumerate(present)}
        strict = strategy.lightning_module.strict_loading
        return self._flowstone.load(path, (_MODEL, strategy.model), optimizers, strict=strict)

    def remove_checkpoint(self, filepath: Any) -> None:
        self._flowstone.remove(_local(filepath), lambda: super(TrainerStrategy, self).remove_checkpoint(filepath))  # type: ignore[misc]

    def teardown(self) -> None:
        try:
            self._flowstone.close()
        finally:
            super().teardown()  # type: ignore[misc]


class FabricStrategy(ABC):
    """Methods for a Fabric strategy, which override Lightning's."""

    _flowstone: StrategyCheckpoints

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: object = None, filter: object = None
    ) -> None:
        strategy: Any = self
        _refuse(storage_options)
        if filter is not None:
            raise ArgumentError("filter= is not supported", next="leave keys out of the state")
        key, model = _model_of(state)
        shards = with_shards(model)
        sharded: dict[str, Any] = {key: get_model_state_dict(shards)}
        sharded |= {
            name: get_optimizer_state_dict(shards, item) for name, item in state.items() if isinstance(item, Optimizer)
        }
        others = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in state.items() if name not in sharded
        }
        self._flowstone.save(strategy.broadcast(path), sharded, others, leads=strategy.global_rank == 0)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        strategy: Any = self
        place = _local(strategy.broadcast(path))
        self._flowstone.await_all()
        if place.is_file() or is_lightning_checkpoint(place):
            theirs: dict[str, Any] = super().load_checkpoint(place, state, strict, weights_only)  # type: ignore[misc]
            return theirs
        if not isinstance(state, dict):
            raise ArgumentError(
                "a load needs a state with the model", found=shown(state),
                next="write fabric.load(path, {'model': model, ...})",
            )
        optimizers = {name: value for name, value in state.items() if isinstance(value, Optimizer)}
        model = _model_of(state)
        others = self._flowstone.load(place, model, optimizers, strict=strict)
        asked = [name for name in state if name != model[0] and name not in optimizers]
        missing = [name for name in asked if name not in others]
        if missing and strict:
            raise MismatchError(
                f"{place} has no section {missing[0]!r}", found=", ".join(sorted(others)),
                next="pass strict=False to load the sections that exist",
            )
        for name in asked:
            if name in others:
                _restore_value(state, name, others.pop(name))
        return others


def _restore_value(state: dict[str, Any], name: str, value: object) -> None:
    """Restore a value of the state. A stateful object loads it; any other object is replaced."""
    if hasattr(state[name], "load_state_dict"):
        state[name].load_state_dict(value)
    else:
        state[name] = value


def _model_of(state: Mapping[str, Any]) -> tuple[str, Module]:
    models = [(name, value) for name, value in state.items() if isinstance(value, Module)]
    if len(models) != 1:
        raise ArgumentError(
            f"a sharded checkpoint holds one model, but the state has {len(models)}", found=", ".join(map(str, state)),
            next="save each model to its own path, with its optimizers",
        )
    return models[0]


def _load_parts(
    place: Path, engine: EngineOptions, model: tuple[str, Module], optimizers: Mapping[str, Optimizer], *, strict: bool
) -> None:
    """Load the model, then its optimizers, whose state is sharded like the parameters.

    strict  as in `load_state_dict`, for the model. An optimizer gets exactly the state (such as exp_avg) that is in the
            checkpoint
    """
    def fill(state: dict[str, Any], *, strict: bool = True) -> Any:
        planner = DefaultLoadPlanner(allow_partial_load=not strict)
        load(state, storage_reader=FlowstoneReader(place, engine=engine), planner=planner)
        return next(iter(state.values()))

    key, module = model
    set_model_state_dict(module, fill({key: get_model_state_dict(module)}, strict=strict))
    for name, optimizer in optimizers.items():
        state: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
        state["state"] = _slots_of(place, engine, name, optimizer, state)
        # not strict, as a parameter without a gradient has no state in the optimizer
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(module, optimizer, optim_state_dict=fill({name: state}), options=options)


def _slots_of(
    place: Path, engine: EngineOptions, section: str, optimizer: Optimizer, state: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The tensors into which an optimizer's state (slots, such as exp_avg) is loaded: the optimizer's own tensors, and
    new ones for slots that it lacks.

    state  the optimizer's state dict, as torch returns it; a new optimizer already has slots for all parameters

    raises  MismatchError  the checkpoint has slots for names that are not parameters of the optimizer
    """
    groups = zip(state["param_groups"], optimizer.param_groups, strict=True)
    parameters = {
        name: parameter for named, own in groups if len(named["params"]) == len(own["params"])
        for name, parameter in zip(named["params"], own["params"], strict=True)
    }
    stored = _stored_slots(FlowstoneReader(place, engine=engine).read_metadata(), section)
    targets: dict[str, dict[str, Any]] = {}
    for name in (*(name for name in parameters if name in stored), *(stored.keys() - parameters.keys())):
        own, slots = state["state"].get(name, {}), stored[name]
        new = {slot: slot_value for slot, slot_value in slots.items() if slot not in own}
        if new and (name not in parameters or None in new.values()):
            raise MismatchError(
                f"{place} has optimizer state of {name!r} that the optimizer {section!r} cannot hold",
                found=", ".join(new), next="load into a new optimizer of the class that was saved",
            )
        targets[name] = {slot: slot_value for slot, slot_value in own.items() if slot in slots}
        targets[name] |= {slot: _new_slot(slot_value, parameters[name]) for slot, slot_value in new.items()}
    return targets


def _stored_slots(metadata: Metadata, section: str) -> dict[str, dict[str, Any]]:
    """name of a parameter -> name of a slot (tensor of its optimizer state) -> DCP's metadata of the slot. None for a
    slot that contains tensors inside of another value.
    """
    stored: dict[str, dict[str, Any]] = {}
    for full, path in metadata.planner_data.items():
        if path[:2] == (section, "state") and len(path) > 3:
            name, slot = path[2:4]
            stored.setdefault(name, {})[slot] = metadata.state_dict_metadata[full] if len(path) == 4 else None
    return stored


def _new_slot(stored: Any, parameter: torch.Tensor) -> Any:
    """A new tensor for a slot (tensor of optimizer state). It is sharded like the parameter if it has the same shape.
    None for values other than tensors.
    """
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _leaves(others: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap sections so that DCP stores each as one object. Otherwise it would flatten dicts and lists, and turn keys
    into strings.
    """
    return {
        key: (value,) if isinstance(value, dict | list | tuple) else value for key, value in validated(others).items()
    }


def _refuse(storage_options: object) -> None:
    if storage_options is not None:
        raise ArgumentError(
            f"storage_options={storage_options!r:.60} is not supported",
            next="leave it out; give I/O options as flowstone_strategy(strategy, engine=...)",
        )


def _local(path: Any) -> Path:
    if not is_local(path):
        raise ArgumentError(f"{path!r:.200} is not the path of a directory", next="give a directory")
    return Path(os.path.abspath(path))
