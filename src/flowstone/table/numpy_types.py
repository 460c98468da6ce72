"""numpy's types for stored dtypes; types that numpy lacks come from the package ml_dtypes."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from flowstone.errors import UnsupportedStateError
from flowstone.table.dtype import DType


def numpy_type(dtype: DType) -> np.dtype[Any]:
    """The type of numpy or of ml_dtypes for a dtype. Raises UnsupportedStateError if neither has it."""
    try:
        known = np.dtype(dtype.name)
        if known.type.__module__ == "numpy":  # a type that another library has added may be missing in other processes
            return known
    except TypeError:
        pass  # numpy has no such type; ml_dtypes may have it
    others = import_module("ml_dtypes") if find_spec("ml_dtypes") else None
    other: type[Any] | None = getattr(others, dtype.name, None)
    if other is None or np.dtype(other).itemsize != dtype.item_bytes:
        raise UnsupportedStateError(
            f"numpy has no dtype {dtype.name}", next="pip install ml_dtypes, or read the tensor with framework='torch'"
        )
    return np.dtype(other)
