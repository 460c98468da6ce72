"""`flowstone_strategy`: strategies whose processes hold parts of a model save and load these through Flowstone."""

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

from flowstone.adapters.dcp import FlowstoneReader
from flowstone.adapters.dcp.layout import RECORD as DCP_RECORD
from flowstone.adapters.dcp.target import is_local
from flowstone.adapters.deriving import derive
from flowstone.adapters.lightning.background import close_saves
from flowstone.adapters.lightning.checkpoint_io import AT_ONCE, is_last, target_for
from flowstone.adapters.lightning.packages import sharded_strategies
from flowstone.adapters.lightning.reading import checked
from flowstone.adapters.lightning.sharded_saves import ShardedSaves, is_lightnings
from flowstone.adapters.lightning.values import validated, values_of
from flowstone.adapters.outer_exception import OuterException
from flowstone.arguments import shown
from flowstone.checkpoint import open_checkpoint
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError, MismatchError
from flowstone.state.fsdp2 import with_shards
from flowstone.store.local import LocalStore

T = TypeVar("T")

_MODEL = "state_dict"
"""The section of a Trainer's model; its optimizers are optimizer_0 and so on."""


def flowstone_strategy(strategy: T, *, asynchronous: bool = True, engine: EngineOptions | None = None) -> T:
    """Let a sharded strategy save and load through Flowstone; returns the same object, before it is used.

    strategy      an FSDPStrategy(state_dict_type="sharded") or a ModelParallelStrategy, of a Trainer or of Fabric
    asynchronous  False: a save returns once it is durable, and no copy of the state is made
    engine        how bytes move

    Every rank writes its own part, and reads what it needs, on any number of ranks.

    raises  FrameworkError  Lightning is missing, or of a version with another interface
            ArgumentError   this is no such strategy, or one that gathers the whole state on rank 0
    """
    if engine is not None and not isinstance(engine, EngineOptions):
        raise ArgumentError(f"engine {engine!r:.60} is not an EngineOptions", next="write fs.EngineOptions(...)")
    for kind, is_trainers in sharded_strategies():
        if isinstance(strategy, kind):
            _check_sharded(strategy)
            derive(strategy, TrainerStrategy if is_trainers else FabricStrategy, kind)
            strategy._flowstone = Sharded(asynchronous, engine or EngineOptions())  # type: ignore[attr-defined]
            return strategy
    raise ArgumentError(
        f"{shown(strategy)} is no strategy whose processes save parts of a model",
        next="give a ModelParallelStrategy(...) or an FSDPStrategy(state_dict_type='sharded'); where each process has "
        "the whole model, pass plugins=[FlowstoneIO()] instead",
    )


def _check_sharded(strategy: Any) -> None:
    if getattr(strategy, "_state_dict_type", "sharded") != "sharded":
        raise ArgumentError(
            f"{type(strategy).__name__} would gather the whole state on rank 0",
            found=f"state_dict_type={strategy._state_dict_type!r}", next="pass state_dict_type='sharded' to it",
        )
    if not getattr(strategy, "_save_distributed_checkpoint", True):
        raise ArgumentError(
            f"{type(strategy).__name__} would gather the whole state on rank 0",
            found="save_distributed_checkpoint=False", next="leave save_distributed_checkpoint out",
        )


class Sharded:
    """What one strategy saves, and the verbs that Trainer and Fabric share."""

    def __init__(self, asynchronous: bool, engine: EngineOptions) -> None:
        self._asynchronous, self._engine = asynchronous, engine
        self._saves: ShardedSaves | None = None
        self._outer_exception = OuterException()

    def save(self, path: object, sharded: Mapping[str, Any], others: Mapping[str, Any], *, leads: bool) -> None:
        """Save both as one checkpoint; what is not sharded is that of rank 0."""
        target = target_for(others, path)

        def state() -> dict[str, Any]:
            return {**sharded, **(_leaves(others) if leads else {})}

        self._mine().save(
            target, state, keep_name=not is_last(others, target),
            in_background=self._asynchronous and not target.name.startswith(AT_ONCE),
        )

    def load(
        self, path: Path, model: tuple[str, Module], optimizers: Mapping[str, Optimizer], *, strict: bool
    ) -> dict[str, Any]:
        """Fill a model and its optimizers, each rank its own parts, verified. Returns all other sections.

        raises  NoCheckpointError, NotAStoreError, DamagedError, MismatchError
        """
        place = checked(path)
        store = LocalStore(place, self._engine)
        try:
            checkpoint = open_checkpoint(store)
            missing = [key for key in (model[0], *optimizers) if key not in checkpoint.objects]
            if missing:
                raise MismatchError(
                    f"{place} has no section {missing[0]!r}", found=", ".join(sorted(checkpoint.objects)),
                    next="resume from a checkpoint of the whole state" if missing[0] in optimizers
                    else "give the keys under which it was saved",
                )
            _load_parts(place, self._engine, model, optimizers, strict=strict)
            own = {model[0], *optimizers, DCP_RECORD}
            others = values_of(checkpoint, [key for key in checkpoint.objects if key not in own])
            return {key: leaf[0] if type(leaf) is tuple else leaf for key, leaf in others.items()}
        finally:
            store.close()

    def remove(self, path: Path, remove_others: Any) -> None:
        self._mine().remove(path, remove_others)

    def await_all(self) -> None:
        if self._saves is not None:
            self._saves.await_all()

    def wait(self) -> None:
        """Wait until all that was saved is durable. Raises SaveFailedError for a failure that was not raised yet."""
        if self._saves is not None:
            self._saves.wait()

    def close(self) -> None:
        """Wait for all saves, and give the memory back; the next save takes it anew."""
        training_failed = self._outer_exception.training_has_failed()
        self._outer_exception = OuterException()  # a caller may train again in its except block
        saves, self._saves = self._saves, None
        if saves is not None:
            close_saves(saves, training_has_failed=training_failed)

    def _mine(self) -> ShardedSaves:
        if self._saves is None:
            self._saves = ShardedSaves(self._engine)
        return self._saves


class TrainerStrategy(ABC):  # as Lightning's are: only so can an object of theirs become one of a class that has this
    """Methods of a Trainer's strategy, over those of Lightning, which still read what Lightning itself has saved."""

    _flowstone: Sharded

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: object = None) -> None:
        strategy: Any = self
        _refuse(storage_options)
        others = dict(checkpoint)
        sharded = {_MODEL: others.pop(_MODEL)}
        sharded |= {f"optimizer_{at}": state for at, state in enumerate(others.pop("optimizer_states", ()))}
        self._flowstone.save(strategy.broadcast(filepath), sharded, others, leads=strategy.global_rank == 0)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        strategy: Any = self
        path = _local(strategy.broadcast(checkpoint_path))
        self._flowstone.await_all()
        if path.is_file() or is_lightnings(path):
            found: dict[str, Any] = super().load_checkpoint(path, weights_only)  # type: ignore[misc]
            return found
        is_fitting = strategy.lightning_module.trainer.state.fn == "fit"
        optimizers = {f"optimizer_{at}": one for at, one in enumerate(strategy.optimizers if is_fitting else ())}
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
    """Methods of a strategy of Fabric, over those of Lightning."""

    _flowstone: Sharded

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: object = None, filter: object = None
    ) -> None:
        strategy: Any = self
        _refuse(storage_options)
        if filter is not None:
            raise ArgumentError("filter= is not taken: each rank saves its part", next="leave keys out of the state")
        key, model = _model_of(state)
        shards = with_shards(model)
        sharded: dict[str, Any] = {key: get_model_state_dict(shards)}
        sharded |= {
            name: get_optimizer_state_dict(shards, one) for name, one in state.items() if isinstance(one, Optimizer)
        }
        others = {
            name: one.state_dict() if hasattr(one, "state_dict") else one
            for name, one in state.items() if name not in sharded
        }
        self._flowstone.save(strategy.broadcast(path), sharded, others, leads=strategy.global_rank == 0)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        strategy: Any = self
        place = _local(strategy.broadcast(path))
        self._flowstone.await_all()
        if place.is_file() or is_lightnings(place):
            found: dict[str, Any] = super().load_checkpoint(place, state, strict, weights_only)  # type: ignore[misc]
            return found
        if not isinstance(state, dict):
            raise ArgumentError(
                "a load needs the model that it fills", found=shown(state),
                next="write fabric.load(path, {'model': model, ...})",
            )
        optimizers = {name: one for name, one in state.items() if isinstance(one, Optimizer)}
        model = _model_of(state)
        others = self._flowstone.load(place, model, optimizers, strict=strict)
        asked = [name for name in state if name != model[0] and name not in optimizers]
        missing = [name for name in asked if name not in others]
        if missing and strict:
            raise MismatchError(
                f"{place} has no section {missing[0]!r}", found=", ".join(sorted(others)), next="pass strict=False"
            )
        for name in asked:
            if name in others:
                _give(state, name, others.pop(name))
        return others


def _give(state: dict[str, Any], name: str, value: object) -> None:
    """Bring a value back: into an object that loads states, else in its place."""
    if hasattr(state[name], "load_state_dict"):
        state[name].load_state_dict(value)
    else:
        state[name] = value


def _model_of(state: Mapping[str, Any]) -> tuple[str, Module]:
    models = [(name, one) for name, one in state.items() if isinstance(one, Module)]
    if len(models) != 1:
        raise ArgumentError(
            f"the state has {len(models)} models, and a sharded checkpoint holds one", found=", ".join(map(str, state)),
            next="save each model to a path of its own, with its optimizers",
        )
    return models[0]


def _load_parts(
    place: Path, engine: EngineOptions, model: tuple[str, Module], optimizers: Mapping[str, Optimizer], *, strict: bool
) -> None:
    """The model first: the state of its optimizers lies as its parameters do.

    strict  of the model. An optimizer has the slots that the checkpoint has, and no others
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
        options = StateDictOptions(strict=False)  # a parameter without a gradient had no slots
        set_optimizer_state_dict(module, optimizer, optim_state_dict=fill({name: state}), options=options)


def _slots_of(
    place: Path, engine: EngineOptions, section: str, optimizer: Optimizer, state: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Targets for the slots that the checkpoint has: those of the optimizer, and new ones for what it lacks.

    state  what torch returns of the optimizer: slots of all parameters if it is new, of stale steps if it is not

    raises  MismatchError  slots of what is no parameter of the optimizer
    """
    groups = zip(state["param_groups"], optimizer.param_groups, strict=True)
    parameters = {
        name: one for named, own in groups if len(named["params"]) == len(own["params"])
        for name, one in zip(named["params"], own["params"], strict=True)
    }
    stored = _stored_slots(FlowstoneReader(place, engine=engine).read_metadata(), section)
    found: dict[str, dict[str, Any]] = {}
    for name in (*(name for name in parameters if name in stored), *(stored.keys() - parameters.keys())):
        own, slots = state["state"].get(name, {}), stored[name]
        new = {slot: one for slot, one in slots.items() if slot not in own}
        if new and (name not in parameters or None in new.values()):
            raise MismatchError(
                f"{place} has slots of {name!r} for which the optimizer {section!r} has no place",
                found=", ".join(new), next="load into a new optimizer of the kind that was saved",
            )
        found[name] = {slot: one for slot, one in own.items() if slot in slots}
        found[name] |= {slot: _new_slot(one, parameters[name]) for slot, one in new.items()}
    return found


def _stored_slots(metadata: Metadata, section: str) -> dict[str, dict[str, Any]]:
    """What DCP's metadata says of each slot of an optimizer, by parameter; None of one that has tensors inside."""
    found: dict[str, dict[str, Any]] = {}
    for full, path in metadata.planner_data.items():
        if path[:2] == (section, "state") and len(path) > 3:
            name, slot = path[2:4]
            found.setdefault(name, {})[slot] = metadata.state_dict_metadata[full] if len(path) == 4 else None
    return found


def _new_slot(stored: Any, parameter: torch.Tensor) -> Any:
    """What a slot is read into: of the parameter's shape, as the parameter lies; None for what is no tensor."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _leaves(others: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that DCP takes for one object each: it looks into dicts and lists, and makes text of their keys."""
    return {
        key: (value,) if isinstance(value, dict | list | tuple) else value for key, value in validated(others).items()
    }


def _refuse(storage_options: object) -> None:
    if storage_options is not None:
        raise ArgumentError(
            f"storage_options {storage_options!r:.60} is not taken",
            next="leave it out: flowstone_strategy(strategy, engine=...)",
        )


def _local(path: Any) -> Path:
    if not is_local(path):
        raise ArgumentError(f"{path!r:.200} is no path of a directory", next="give a directory")
    return Path(os.path.abspath(path))
