"""What DeepSpeed hands over to be saved, as values that a checkpoint holds, and back: no pickle on either way."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from flowstone.errors import UnsupportedFormatError

_TAG = "__deepspeed__"
_CLASSES: Mapping[str, str] = {
    "LossScaler": "deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "fragment_address": "deepspeed.utils.tensor_fragment", "SubparamShape": "deepspeed.checkpoint.utils",
}
"""Classes whose instances are their fields. No other one is ever looked up."""
_STAGE, _STAGE_MODULE = "ZeroStageEnum", "deepspeed.runtime.zero.config"
LATE = frozenset({"module", "optimizer", "optimizer_state_dict", "frozen_param_fragments"})
"""Entries whose tensors change at an optimizer's step alone: they are captured while training goes on."""


def encoded(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a file of DeepSpeed's would hold. Tensors that may change before the next step are copied.

    A value that no checkpoint of ours can hold stays as it is: the save names it.
    """
    buffers = frozenset(state.get("buffer_names") or ())
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == "module" and isinstance(value, Mapping):
            found[key] = OrderedDict((name, _encoded(one, copies=name in buffers)) for name, one in value.items())
        else:
            found[key] = _encoded(value, copies=key not in LATE)
    return found


def _encoded(value: Any, *, copies: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if copies else value
    if isinstance(value, dict):
        return _like(value, ((key, _encoded(inner, copies=copies)) for key, inner in value.items()))
    if type(value) in (list, tuple):
        return type(value)(_encoded(inner, copies=copies) for inner in value)
    kind = type(value)
    if kind.__name__ == _STAGE and kind.__module__ == _STAGE_MODULE:
        return {_TAG: _STAGE, "fields": int(value)}
    if _CLASSES.get(kind.__name__) == kind.__module__:
        return {_TAG: kind.__name__, "fields": _encoded(dict(vars(value)), copies=copies)}
    return value


def decoded(value: Any) -> Any:
    """The values as DeepSpeed had them."""
    if isinstance(value, dict):
        if _TAG in value:
            return _instance(value[_TAG], value.get("fields"))
        return _like(value, ((key, decoded(inner)) for key, inner in value.items()))
    if type(value) in (list, tuple):
        return type(value)(decoded(inner) for inner in value)
    return value


def _like(value: dict[Any, Any], items: Any) -> dict[Any, Any]:
    return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)


def _instance(name: object, fields: Any) -> Any:
    module = _STAGE_MODULE if name == _STAGE else _CLASSES.get(str(name))
    if module is None:
        raise UnsupportedFormatError(
            f"the checkpoint holds a {name!s:.60} of DeepSpeed, which is not known", next="update Flowstone"
        )
    kind = getattr(importlib.import_module(module), str(name))
    if name == _STAGE:
        return kind(fields)
    made = object.__new__(kind)
    vars(made).update(decoded(fields))
    return made
