"""Convert DeepSpeed's state to values that a checkpoint can store, and back. Uses no pickle."""

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
"""Classes whose objects are stored as their fields. A load creates objects of these classes and ZeroStageEnum only."""
_STAGE, _STAGE_MODULE = "ZeroStageEnum", "deepspeed.runtime.zero.config"
CHANGED_BY_STEP = frozenset({"module", "optimizer", "optimizer_state_dict", "frozen_param_fragments"})
"""Entries whose tensors change only at an optimizer step: they are captured while training continues."""


def encode_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the content of one of DeepSpeed's files to values that can be stored. Tensors that may change before the
    next step are copied.

    Values that cannot be stored stay unchanged, and the save raises an error that names them.
    """
    buffers = frozenset(state.get("buffer_names") or ())
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key == "module" and isinstance(value, Mapping):
            result[key] = OrderedDict((name, _encoded(item, copies=name in buffers)) for name, item in value.items())
        else:
            result[key] = _encoded(value, copies=key not in CHANGED_BY_STEP)
    return result


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


def decode_state(value: Any) -> Any:
    """Convert stored values back to DeepSpeed's form."""
    if isinstance(value, dict):
        if _TAG in value:
            return _instance(value[_TAG], value.get("fields"))
        return _like(value, ((key, decode_state(inner)) for key, inner in value.items()))
    if type(value) in (list, tuple):
        return type(value)(decode_state(inner) for inner in value)
    return value


def _like(value: dict[Any, Any], items: Any) -> dict[Any, Any]:
    return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)


def _instance(name: object, fields: Any) -> Any:
    module = _STAGE_MODULE if name == _STAGE else _CLASSES.get(str(name))
    if module is None:
        raise UnsupportedFormatError(
            f"the checkpoint holds an unknown type of DeepSpeed, {name!s:.60}", next="update Flowstone"
        )
    kind = getattr(importlib.import_module(module), str(name))
    if name == _STAGE:
        return kind(fields)
    made = object.__new__(kind)
    vars(made).update(decode_state(fields))
    return made
