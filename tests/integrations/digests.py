"""One number for all that a training has come to."""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Any

import numpy as np
import torch


def digest(value: Any) -> str:
    """Of tensors, arrays, plain values and objects that are their attributes, in containers of any depth.

    raises  TypeError for a type that is not known
    """
    return hashlib.sha256(_bytes_of(value)).hexdigest()


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(repr(key).encode() + _bytes_of(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return b"".join(map(_bytes_of, value))
    if isinstance(value, np.ndarray):
        return repr((value.dtype, value.shape)).encode() + value.tobytes()
    if value is None or isinstance(value, bool | int | float | str | bytes | Enum | torch.dtype | torch.device):
        return repr(value).encode()
    if not callable(value) and getattr(value, "__dict__", None):
        return type(value).__qualname__.encode() + _bytes_of(vars(value))
    raise TypeError(f"no digest of a {type(value)}: two that differ could be taken for equal")
