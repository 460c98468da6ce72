"""The ledger: every tensor that a walk over the state came by, with its name and its memory."""

from __future__ import annotations

import numpy as np
import torch

from flowstone.errors import CollisionError, UnsupportedStateError
from flowstone.pieces import Alias, Box, DType, Memory, Piece
from flowstone.state import tensors
from flowstone.state.names import Place, valid_name
from flowstone.state.records import Shard


class Ledger:
    """Collects pieces in order. The same memory under a second name becomes an alias."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.memory: list[Memory] = []
        self.lazy: list[bool] = []
        self.aliases: list[Alias] = []
        self._places: dict[str, Place] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._whole: dict[tuple[int, ...], Box] = {}

    def add(
        self, place: Place, dtype: DType, memory: Memory, *, within: Shard | None = None, lazy: bool = False
    ) -> None:
        """Enter memory under the place's name; `within` says which box of a larger tensor it is.

        raises  CollisionError when another place has the name, UnsupportedStateError when it is no name
        """
        name = place.name
        self.claim(place)
        shape = memory.shape
        identity = (
            memory.address,
            shape,
            memory.strides_bytes,
            dtype.name,
            memory.device,
            None if within is None else (within.shape, within.offset),
        )
        # Tensors without elements share the null address, not memory.
        if 0 not in shape:
            first = self._names.setdefault(identity, name)
            if first is not name:
                self.aliases.append(Alias(name, first))
                return
        if within is None:
            box = self._whole.get(shape)
            if box is None:
                box = self._whole[shape] = Box.whole(shape)
            self.pieces.append(Piece(name, dtype, shape, box))
        else:
            self.pieces.append(Piece(name, dtype, within.shape, Box(within.offset, shape)))
        self.memory.append(memory)
        self.lazy.append(lazy)

    def claim(self, place: Place) -> None:
        """Make the place's name its own."""
        other = self._places.setdefault(place.name, place)
        if other is not place:
            raise CollisionError(
                f"two paths of the state make the name '{place.name}'",
                first=other.path,
                second=place.path,
                next="rename one of the keys",
            )
        if not valid_name(place.name):
            raise UnsupportedStateError(
                f"{place.name!r} cannot name a tensor", expected="UTF-8 without NUL", next="rename that key"
            )

    def describe_tensor(
        self, place: Place, tensor: torch.Tensor, *, within: Shard | None = None, lazy: bool = False
    ) -> None:
        """Enter a tensor that is to be saved."""
        dtype = tensors.check_tensor(tensor, place.name)
        memory = tensors.memory_of(tensors.resolved(tensor))
        self.add(place, dtype, memory, within=within, lazy=lazy)

    def describe_array(self, place: Place, array: np.ndarray, *, within: Shard | None = None) -> None:
        """Enter an array that is to be saved."""
        dtype = tensors.check_array(array, place.name)
        self.add(place, dtype, tensors.array_memory(tensors.ascending(array)), within=within)
