"""One number for the final state of a training."""

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
    """Bytes that tell one value from any other."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _framed("tensor", repr((value.dtype, tuple(value.shape))).encode(), data)
    if isinstance(value, dict):
        return _framed("dict", *(_bytes_of(part) for item in value.items() for part in item))
    if isinstance(value, list | tuple):
        return _framed("list" if isinstance(value, list) else "tuple", *map(_bytes_of, value))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _framed("array", repr((value.dtype, value.shape)).encode(), value.tobytes())
    if value is None or isinstance(value, bool | int | float | str | bytes | Enum | torch.dtype | torch.device):
        return _framed(type(value).__qualname__, repr(value).encode())
    if not callable(value) and getattr(value, "__dict__", None):
        return _framed(type(value).__qualname__, _bytes_of(vars(value)))
    raise TypeError(f"no digest of a {type(value)}: two that differ could be taken for equal")


def _framed(kind: str, *parts: bytes) -> bytes:
    """What it is, how many parts it has, and each of them, with its length before it."""
    return b"".join([b"%d " % len(parts), *(b"%d:" % len(part) + part for part in (kind.encode(), *parts))])
