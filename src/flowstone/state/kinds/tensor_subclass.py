"""Tensors that are made of tensors, of a type without a registered provider: taken apart, see `split.py`."""

from __future__ import annotations

from flowstone.state.kinds.provided import Provided
from flowstone.state.providers import Served, split_by_itself


class TensorSubclass(Provided):
    """A tensor of a type with `__tensor_flatten__`."""

    def served(self, value: object) -> Served | None:
        return split_by_itself(type(value))
