"""Whether a stored optimizer fits the optimizer into which it is loaded, judged by groups and slots, not by class
names.

A slot is a value for one parameter. A subclass, or a class of another name, fits if it has the same slots. Newer
versions of a class may add or remove settings, and every release adds flags. So only numeric settings are compared, and
they are a mismatch only if each of the two optimizers has one that the other lacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

import torch
from torch import optim

from flowstone.format.inner_objects import StoredGroup, StoredOptimizer
from flowstone.format.objects import TensorRef
from flowstone.torch.optimizer_view import NOT_OPTIONS, OptimizerView

_REQUIRED: Mapping[type, frozenset[str]] = {
    optim.Adam: frozenset({"exp_avg", "exp_avg_sq"}), optim.Adamax: frozenset({"exp_avg", "exp_inf"}),
    optim.NAdam: frozenset({"exp_avg", "exp_avg_sq", "mu_product"}), optim.RAdam: frozenset({"exp_avg", "exp_avg_sq"}),
    optim.AdamW: frozenset({"exp_avg", "exp_avg_sq"}), optim.SparseAdam: frozenset({"exp_avg", "exp_avg_sq"}),
    optim.Adadelta: frozenset({"square_avg", "acc_delta"}), optim.Adagrad: frozenset({"sum"}),
    optim.ASGD: frozenset({"eta", "ax"}), optim.RMSprop: frozenset({"square_avg"}),
    optim.Rprop: frozenset({"prev", "step_size"}),
}
"""Slots that torch's own optimizers expect once a parameter has any: without one, the next step raises KeyError."""

_EVERYBODYS = frozenset({"lr", "weight_decay", "step"})
_OF_SCHEDULERS = frozenset({"initial_lr", "base_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})


def mismatch(
    optimizer: object, view: OptimizerView, stored: StoredOptimizer, stored_slots: Collection[str]
) -> tuple[str, str] | None:
    """How the optimizer of the state and the stored one differ, as two texts (expected, found); None if they fit.

    stored_slots  names of the slots that the checkpoint has for the optimizer's parameters
    """
    mine, theirs = _live_numbers(optimizer, view), _stored_numbers(stored.groups)
    kept = set(stored_slots)
    known = {key for options in view.options for key in options}
    stored_keys = {key for group in stored.groups for key in group.options}
    lacking = mine - stored_keys
    foreign = theirs - known
    live = set(map(str, set(chain.from_iterable(view.slots()))))
    by_slots = bool(live and kept and not live & kept - _EVERYBODYS)
    needed = _required(type(optimizer))
    if needed and any(options.get("amsgrad") for options in view.options) and "amsgrad" not in stored_keys:
        needed |= {"max_exp_avg_sq"}  # amsgrad is on, and the stored groups would turn it off
    by_needs = bool(kept and needed - kept)
    if not (lacking and foreign) and not by_slots and not by_needs:
        return None
    return f"{type(optimizer).__qualname__} {_words(mine, live)}", f"an optimizer {_words(theirs, kept)}"


def _required(kind: type) -> frozenset[str]:
    """The slots that an optimizer class needs for each parameter, if its step is torch's own; otherwise none."""
    base_class = next((base for base in kind.__mro__ if base in _REQUIRED), None)
    # Torch wraps each class's step when its first instance is made.
    if base_class is None or inspect.unwrap(kind.step) is not inspect.unwrap(base_class.step):  # type: ignore[attr-defined]
        return frozenset()
    return _REQUIRED[base_class]


def _live_numbers(optimizer: object, view: OptimizerView) -> set[str]:
    """The settings that the class defines for its groups, if they are numbers in all groups."""
    defined = set(getattr(optimizer, "defaults", ()))
    groups = [{key for key, value in options.items() if _is_number(value)} for options in view.options]
    return set.intersection(defined, *groups) - _EVERYBODYS if groups else set()


def _stored_numbers(groups: Iterable[StoredGroup]) -> set[str]:
    settings = {str(key) for group in groups for key, value in group.options.items() if _is_number(value)}
    return settings - _EVERYBODYS - _OF_SCHEDULERS - NOT_OPTIONS


def _is_number(value: object) -> bool:
    """Whether a setting is a number, a pair of numbers, or a tensor with one number. bool and None are flags, and do
    not count as numbers.
    """
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, int | float | torch.Tensor | TensorRef) and not isinstance(value, bool)


def _words(numbers: Iterable[str], slots: Iterable[str]) -> str:
    shown = f"with {', '.join(sorted(numbers)) or 'no numbers of its own'}"
    return shown + (f", whose state is {', '.join(sorted(slots))}" if slots else "")
