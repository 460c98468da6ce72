"""Ways in which loops pass their state: as state dicts, as views, from threads, by objects that contain objects."""

from __future__ import annotations

import threading
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import flowstone as fs
from hostile.moves.move import Detection, Table
from hostile.moves.surgery import is_parametrized
from hostile.oracle import Contents, contents_of, contents_of_dicts, differences
from hostile.states import Job, views_of

if TYPE_CHECKING:
    from hostile.trainer import Trainer, Try

TABLE = Table()


# State dicts


def dicts_of(job: Job) -> dict[str, Any] | None:
    """The state with state dicts by name instead of modules and optimizers; None if that is not possible."""
    names = {id(parameter): name for name, parameter in job.model.named_parameters()}
    state = dict(job.state)
    for section, value in job.state.items():
        if isinstance(value, nn.Module):
            state[section] = value.state_dict()
        elif isinstance(value, torch.optim.Optimizer):
            parameters = [param for group in value.param_groups for param in group["params"]]
            if not all(id(parameter) in names for parameter in [*parameters, *value.state]):
                return None
            state[section] = {
                "state": {names[id(key)]: dict(slots) for key, slots in value.state.items()},
                "param_groups": [
                    {**group, "params": [names[id(param)] for param in group["params"]]} for group in value.param_groups
                ],
            }
        elif hasattr(value, "optimizer") and section.startswith("optimizer"):
            return None  # a wrapped optimizer has no names
    return state


@TABLE.quiet(weight=2)
def save_dicts(trainer: Trainer, chance: Random) -> bool | None:
    """Saves state dicts by save_state_dict, which captures everything before it returns."""
    if dicts_of(trainer.job) is None:
        return False
    trainer.save(by=lambda step, _: trainer.checkpointer.save_state_dict(step, _dicts(trainer)))
    return None


def _dicts(trainer: Trainer) -> dict[str, Any]:
    dicts = dicts_of(trainer.job)
    assert dicts is not None, "it has names"
    return {**dicts, "step": trainer.state["step"]}


@TABLE.quiet(weight=2)
def load_dicts(trainer: Trainer, chance: Random) -> bool | None:
    """Goes back by load_state_dict, into dicts of the live state, which then contain exactly the saved values."""
    known = [attempt for attempt in trainer.tries if not attempt.gone]
    if any(save.kind != trainer.job.kind for save in known) or dicts_of(trainer.job) is None:
        return False
    before, dicts = contents_of(trainer.state), _dicts(trainer)
    try:
        report = trainer.checkpointer.load_state_dict(dicts)
    except fs.NoCheckpointError:
        return False
    except fs.MismatchError:
        if wrong := differences(before, contents_of(trainer.state)):
            trainer.problem(f"a load of state dicts was refused, and has changed {wrong[:4]}")
        return None
    trainer.inconsistent = trainer.torn = False
    (saved,) = (save for save in known if save.step == report.step)
    _check(trainer, saved, contents_of_dicts(dicts), "the dicts of")
    _hand_over(trainer.job, dicts)
    _check(trainer, saved, contents_of(trainer.state), "what was handed over of")
    return None


def _check(trainer: Trainer, saved: Try, contents: Contents, kind: str) -> None:
    if wrong := differences(saved.wanted, contents):
        trainer.problem(f"{kind} step {saved.step} were loaded wrong: {wrong[:4]}")


def _hand_over(job: Job, dicts: dict[str, Any]) -> None:
    """Load the dicts into the objects by the objects' own load_state_dict."""
    parameters = dict(job.model.named_parameters())
    for section, value in job.state.items():
        if isinstance(value, nn.Module):
            value.load_state_dict(dicts[section])
        elif isinstance(value, torch.optim.Optimizer):
            value.state.clear()
            value.state.update({parameters[name]: dict(slots) for name, slots in dicts[section]["state"].items()})


@TABLE.quiet(weight=2, needs="slots")
def drop_the_slots_of_one(trainer: Trainer, chance: Random) -> bool | None:
    """An optimizer loses the slots of a parameter, as if that had no gradient yet."""
    for optimizer in trainer.job.optimizers:
        if optimizer.state:
            del optimizer.state[chance.choice(list(optimizer.state))]
            return None
    return False


# Views


@TABLE.quiet(weight=2, needs="views")
def take_views(trainer: Trainer, chance: Random) -> bool | None:
    """The state contains views of the model's present weights."""
    if "views" not in trainer.job.state:
        return False
    trainer.job.state["views"] = views_of(trainer.job.model, contiguous=trainer.setup.exact)
    return None


@TABLE.escapes(Detection.SAMPLES, needs="views")
def change_through_a_view(trainer: Trainer, chance: Random) -> bool | None:
    """Changes all elements of a weight through a view that is in the state."""
    if "views" not in trainer.job.state:
        return False
    trainer.job.state["views"]["all"].add_(1)
    return None


@TABLE.quiet(needs="views")
def tear_views(trainer: Trainer, chance: Random) -> bool | None:
    """Views get memory of their own from here on, with other values; later steps cannot be loaded into views."""
    if "views" not in trainer.job.state:
        return False
    trainer.job.state["views"] = {name: view.clone().add_(1) for name, view in trainer.job.state["views"].items()}
    return None


# Objects that contain objects


@TABLE.quiet(weight=2, needs="nested")
def step_what_is_nested(trainer: Trainer, chance: Random) -> bool | None:
    """A schedule steps the schedule that it contains, and draws from its generator."""
    if "nested" not in trainer.job.state:
        return False
    trainer.job.state["nested"].step()
    return None


@TABLE.quiet(needs="nested")
def load_what_is_nested(trainer: Trainer, chance: Random) -> bool | None:
    """Saves, makes steps, and goes back: nested objects have their saved state, and are the same objects."""
    nested = trainer.job.state.get("nested")
    if nested is None or trainer.inconsistent:
        return False
    expected = nested.values()
    save = trainer.save()
    trainer.settle()
    nested.step()
    if save is None or save.save is None or save.failure is not None:
        return None
    try:
        trainer.checkpointer.load(trainer.state, step=save.step)
    except fs.NoCheckpointError:
        if trainer.setup.keep is None:
            raise
        return None
    if nested.values() != expected:
        trainer.problem(f"nested objects are {nested.values()[:3]}, and were {expected[:3]}")
    nested.step()
    return None


# Entries that modules write themselves


class Calibrated(nn.Linear):
    """Writes a statistic of its own, and reads it."""

    absmax: torch.Tensor

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}absmax"] = self.absmax

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        own = state_dict.pop(f"{prefix}absmax", None)
        if own is not None:
            self.absmax = own.detach().clone()
        super()._load_from_state_dict(state_dict, prefix, *others)


class Unread(Calibrated):
    """Writes a statistic, and does not read it."""

    def _load_from_state_dict(self, *given: Any) -> None:
        nn.Linear._load_from_state_dict(self, *given)


def _layer(trainer: Trainer, chance: Random) -> nn.Linear | None:
    body = trainer.job.model.body
    result = [item for item in body if type(item) is nn.Linear and not is_parametrized(item)]
    return chance.choice(result) if result and trainer.job.average is None else None


@TABLE.quiet()
def calibrate(trainer: Trainer, chance: Random) -> bool | None:
    """A layer writes a statistic into its state dict from here on, and reads it."""
    layer = _layer(trainer, chance)
    if layer is None:
        return False
    layer.__class__ = Calibrated
    layer.absmax = layer.weight.detach().abs().amax().clone()
    return None


@TABLE.quiet()
def write_what_nothing_reads(trainer: Trainer, chance: Random) -> bool | None:
    """A layer writes a statistic that its load does not read: it loads only into another layer, by a rule."""
    layer = _layer(trainer, chance)
    if layer is None or trainer.inconsistent:
        return False
    layer.__class__ = Unread
    layer.absmax = torch.rand(3)
    save = trainer.save()
    trainer.settle()
    is_there = save is not None and save.save is not None and save.failure is None
    try:
        if save is not None and is_there and not save.gone:
            trainer.checkpointer.load(trainer.state, step=save.step)
            trainer.problem("what nothing reads was loaded")
    except fs.NoCheckpointError:
        is_there = False
        if trainer.setup.keep is None:
            raise
    except fs.StateError as error:
        if "absmax" not in str(error):
            raise
    finally:
        layer.__class__ = nn.Linear
        del layer.absmax
    if save is not None and is_there:  # part of the state was loaded: it must be from this step
        trainer.checkpointer.load(trainer.state, step=save.step, rules=fs.Skip("*.absmax"))
    return None


# Threads


@TABLE.quiet(weight=2)
def save_in_a_forward(trainer: Trainer, chance: Random) -> None:
    """Another thread saves during a forward pass, which continues undisturbed."""
    with torch.no_grad():
        trainer.job.model.eval()
        numbers = trainer.job.batch()
        expected = trainer.job.model(numbers)
        layer = chance.choice([trainer.job.model.norm, trainer.job.model.wide])

        def save(*_: object) -> None:
            thread = threading.Thread(target=trainer.save)
            thread.start()
            thread.join()

        hook = layer.register_forward_pre_hook(save)
        actual = trainer.job.model(numbers)
        hook.remove()
        trainer.job.model.train()
    if not ((actual == expected) | (actual.isnan() & expected.isnan())).all():
        trainer.problem("a forward pass is another one where a thread saves meanwhile")
