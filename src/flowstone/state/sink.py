"""The sink: every tensor that a walk over the state finds, with its name and its memory.

Tensors are first collected, and examined all at once when the walk is over: a state has tens of thousands of them, and
most of the cost of a column is the first access to each tensor.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowstone.config import PACKED_BELOW_BYTES
from flowstone.errors import CollisionError, UnsupportedStateError
from flowstone.format.objects import unsupported
from flowstone.state import tensors
from flowstone.state.flat import Range
from flowstone.state.frozen import Frozen
from flowstone.state.names import Place, check_shared, valid_name
from flowstone.state.records import Shard
from flowstone.table.box import Box
from flowstone.table.dtype import DType
from flowstone.table.pieces import Alias, Layout, Memory, Pieces, Places, TensorColumns


class Role(enum.IntEnum):
    """What a tensor is in the state: decides when it may change, and whose value is saved if ranks differ."""

    OTHER = enum.auto()  # may change at any time
    STEPPED = enum.auto()  # changes only after the fence: in the step of one of the state's optimizers
    UNOWNED = enum.auto()  # a trained model's parameter without an optimizer: frozen if it never changes
    PARAMETER = enum.auto()  # any other; may change at any time: an average, or changed by its module
    BUFFER = enum.auto()  # may change at any time; each rank may have its own; the lowest rank's is saved


_NO_TENSOR = torch.empty(0)  # placeholder for memory that was entered without a tensor


class Sink:
    """Takes entries in order. The same memory under a second name becomes an alias."""

    def __init__(self, *, objects_only: bool = False, whole: bool = False) -> None:
        """With `objects_only`, refuses tensors: for values described while bytes already move.

        whole  refuse parts of tensors: no other rank saves the rest
        """
        self.objects_only, self._whole = objects_only, whole
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self._roles = bytearray()  # each a Role
        self._given: dict[int, tuple[DType, Memory]] = {}
        self._within: dict[int, Shard] = {}
        self._runs: list[tuple[int, Place, Sequence[object] | None]] = []
        self._tied: list[tuple[Place, str]] = []
        self.split: set[str] = set()  # names of tensors that one object holds, or may hold, in several boxes

    def enter(
        self, place: Place, tensor: torch.Tensor, *, within: Shard | Range | None = None, role: Role = Role.OTHER
    ) -> None:
        """Enter a tensor under the place's name; `within`: its part of a larger tensor."""
        if self.objects_only:
            raise unsupported(place.name, tensor, "is a tensor, or as large as one", "describe it as a Part")
        if isinstance(within, Range):
            # Even for one box: another rank may have several, and aliases must be the same on all ranks.
            self.split.add(place.name)
            self.enter_boxes(place, within.cut(tensor), tensor, role)
            return
        if within is not None:
            self._within[len(self.names)] = within
        self._runs.append((len(self.names), place, None))
        self.names.append(place.name)
        self.tensors.append(tensor)
        self._roles.append(role)

    def tie(self, place: Place, target: str) -> None:
        """Enter the place's name as an alias of the tensor called `target`, in however many boxes that is."""
        self._tied.append((place, target))

    def enter_boxes(self, place: Place, held: Sequence[Shard], tensor: torch.Tensor, role: Role) -> None:
        """Enter the boxes that this rank holds of a larger tensor: none, one or several."""
        check_shared(place, tensor)
        if self._whole and not held:
            raise _part(place.name, "no element of it")
        if len(held) > 1:
            self.split.add(place.name)
        for shard in held:
            self.enter(place, cast("torch.Tensor", shard.tensor), within=shard, role=role)

    def enter_all(
        self, place: Place, keys: Sequence[object], names: Sequence[str], values: Sequence[torch.Tensor], *,
        roles: Sequence[Role] = (),
    ) -> None:
        """Enter tensors of one place, each with its own entry of `names` and of `keys`."""
        if names:
            if self.objects_only:
                self.enter(place.called(names[0], keys[0]), values[0])
            self._runs.append((len(self.names), place, keys))
            self.names.extend(names)
            self.tensors.extend(values)
            self._roles.extend(roles or repeat(Role.OTHER, len(names)))

    def add(
        self, place: Place, dtype: DType, memory: Memory, *, within: Shard | None = None, role: Role = Role.OTHER
    ) -> None:
        """Enter memory that is no tensor's."""
        self._given[len(self.names)] = (dtype, memory)
        self.enter(place, _NO_TENSOR, within=within, role=role)

    def add_array(
        self, place: Place, array: np.ndarray, *, within: Shard | None = None, role: Role = Role.OTHER
    ) -> None:
        """Enter an array that is to be saved."""
        dtype = tensors.check_array(array, place.name)
        self.add(place, dtype, tensors.array_memory(tensors.ascending(array)), within=within, role=role)

    def place(self, position: int) -> Place:
        """The place of an entry."""
        start, place, keys = self._runs[bisect_right(self._runs, position, key=lambda run: run[0]) - 1]
        return place if keys is None else place.called(self.names[position], keys[position - start])

    def look(self, *, hold: bool) -> tensors.Columns:
        """Examine every tensor; see `tensors.columns`."""
        return tensors.columns(self.tensors, self.names, hold=hold)

    def close(
        self, columns: tensors.Columns, apart: Mapping[int, Memory], known: Layout | None = None,
        frozen: Frozen | None = None, copied_bytes_max: int | None = None,
    ) -> tuple[Layout, Places, NDArray[np.int64]]:
        """The layout of all entries, the memory of each piece, and for each entry the piece that it is, or an alias of.

        apart   the memory of the columns' odd tensors
        known   an earlier layout: returned itself if nothing differs; if not, equal columns of it are reused
        frozen  what earlier saves have found about parameters that no optimizer owns
        copied_bytes_max  see `describe`
        raises  CollisionError if two places have the same name, UnsupportedStateError for an invalid name
        """
        dtypes, shapes, address = list(columns.dtypes), list(columns.shapes), columns.address.copy()
        owners = list(columns.owners)
        memory = dict(apart)
        for position, (dtype, given) in self._given.items():
            assert given.device == "cpu", "what is no tensor is on the host"
            dtypes[position], shapes[position] = dtype, given.shape
            memory[position] = given
        for position, one in memory.items():
            address[position], owners[position] = one.address, one.owner
        device, numbers = columns.device, {"cpu": -1, **{name: at for at, name in enumerate(columns.devices)}}
        if columns.devices:  # a copy of what is conjugate may be elsewhere than its tensor
            device[list(memory)] = [numbers[one.device] for one in memory.values()]
        ties = self._ties(dtypes, shapes, address, memory)
        tensors = TensorColumns(tuple(self.names), tuple(dtypes), tuple(shapes))
        strided = {at: m for at, m in memory.items() if not m.contiguous}
        places = Places(address, strided, owners, device, columns.devices)
        aliases = (
            *(Alias(self.names[at], self.names[first]) for at, first in ties.items()),
            *(Alias(place.name, target) for place, target in self._tied),
        )
        kept = [at for at in range(len(self.names)) if at not in ties] if ties else range(len(self.names))
        boxed = self._boxed(tensors)
        if self._whole:
            _check_whole(boxed)
        pieces, places = boxed.take(kept), places.take(kept)
        roles = self._kept_roles(kept, ties)
        lazy = self._lazy(roles, kept, pieces, places, frozen)
        if buffers := frozenset(np.flatnonzero(roles == Role.BUFFER).tolist()):
            pieces = replace(pieces, tensors=replace(pieces.tensors, buffers=buffers))
        layout = Layout(pieces, aliases, lazy)
        if known is None or (known.pieces, known.aliases) != (pieces, aliases):
            self._check_names()
            if copied_bytes_max is not None:
                layout = msgspec.structs.replace(layout, lazy=_within_budget(pieces, roles, lazy, copied_bytes_max))
        else:  # their names have been checked
            layout = known if known.lazy == lazy else msgspec.structs.replace(known, lazy=lazy)
        return layout, places, self._pieces_of(ties)

    def _kept_roles(self, kept: Sequence[int], ties: Mapping[int, int]) -> NDArray[np.uint8]:
        """The role of each piece: OTHER if its names have different roles, except that a BUFFER stays one."""
        roles = np.frombuffer(bytes(self._roles), np.uint8)
        if not ties:
            return roles
        roles = roles.copy()
        for at, first in ties.items():
            if roles[first] not in (roles[at], Role.BUFFER):
                roles[first] = Role.OTHER
        return roles[np.array(kept, np.int64)]

    def _lazy(
        self, roles: NDArray[np.uint8], kept: Sequence[int], pieces: Pieces, places: Places, frozen: Frozen | None
    ) -> tuple[bool, ...]:
        """Which pieces may be captured late: those that optimizers step, and frozen ones."""
        lazy = roles == Role.STEPPED
        unowned = np.flatnonzero(roles == Role.UNOWNED).tolist()
        unowned = [at for at in unowned if pieces[at].bytes >= PACKED_BELOW_BYTES]
        if unowned and frozen is not None:
            own = [self.tensors[kept[at]] for at in unowned]
            lazy[unowned] = frozen.among(pieces.take(unowned), places.take(unowned), own)
        return tuple(lazy.tolist())

    def _pieces_of(self, ties: Mapping[int, int]) -> NDArray[np.int64]:
        is_piece = np.ones(len(self.names), np.bool_)
        is_piece[list(ties)] = False
        position = np.cumsum(is_piece) - 1
        position[list(ties)] = position[list(ties.values())]
        return position

    def _boxed(self, tensors: TensorColumns) -> Pieces:
        """The pieces, with the global shapes and boxes of those that are shards."""
        if not self._within:
            return Pieces(tensors)
        shapes, parts = list(tensors.shapes), {}
        for position, shard in self._within.items():
            box = Box(shard.offset, tuple(shapes[position]))
            shapes[position] = shard.shape
            if box != Box.whole(shard.shape):
                parts[position] = box
        return Pieces.cut(replace(tensors, shapes=tuple(shapes)), parts)

    def _ties(
        self, dtypes: Sequence[DType], shapes: Sequence[tuple[int, ...]], address: NDArray[np.uint64],
        memory: Mapping[int, Memory],
    ) -> dict[int, int]:
        """Entries that are the same elements in memory as an earlier entry, and that entry."""
        ordered = np.sort(address)
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        ties: dict[int, int] = {}
        if not again.any():  # tensors without elements share the null address, not memory
            return ties
        seen: dict[tuple[object, ...], int] = {}
        for position in np.flatnonzero(np.isin(address, again)).tolist():
            if 0 in shapes[position] or self.names[position] in self.split:
                continue  # an alias names a whole tensor, not a box
            one = memory.get(position) or tensors.memory_of(self.tensors[position])
            shard = self._within.get(position)
            box = None if shard is None else (shard.shape, shard.offset)
            identity = (one.address, one.shape, one.strides_bytes, dtypes[position].name, one.device, box)
            first = seen.setdefault(identity, position)
            if first != position:
                ties[position] = first
        return ties

    def _check_names(self) -> None:
        if len(set(self.names)) != len(self.names):
            seen: dict[str, int] = {}
            for position, name in enumerate(self.names):
                first = seen.setdefault(name, position)
                if first != position and not self._are_boxes(first, position):
                    raise CollisionError(
                        f"two paths of the state have the same name '{name}'", first=self.place(first).path,
                        second=self.place(position).path, next="rename one of the keys",
                    )
        known = set(self.names) if self._tied else set()
        for place, target in self._tied:
            if place.name in known:
                raise CollisionError(
                    f"two paths of the state have the same name '{place.name}'", first=place.path,
                    second=f"a tensor tied to '{target}'", next="rename one of the keys",
                )
        if not valid_name("".join(self.names)):
            wrong = next(name for name in self.names if not valid_name(name))
            raise UnsupportedStateError(
                f"{wrong!r} cannot name a tensor", expected="UTF-8 without NUL", next="rename that key"
            )

    def _are_boxes(self, one: int, other: int) -> bool:
        """Whether two entries of the same name are boxes of one tensor that one object holds."""
        boxed = one in self._within and other in self._within and self.names[one] in self.split
        return boxed and self.place(one).parent is self.place(other).parent


def _check_whole(pieces: Pieces) -> None:
    """Raise UnsupportedStateError for the first tensor of which this rank holds only a part."""
    held: dict[str, int] = {}
    for at, elements in zip(pieces.parts.tolist(), pieces.part_elements().tolist(), strict=True):
        held[pieces.names[at]] = held.get(pieces.names[at], 0) + elements
    for at, box in pieces.part_boxes():
        if held[pieces.names[at]] < math.prod(pieces.shapes[at]):
            raise _part(pieces.names[at], f"{box} of shape {tuple(pieces.shapes[at])}")


def _part(name: str, found: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"this process holds only a part of {name!r}; the rest is on other ranks", found=found,
        next="save it with a Checkpointer that all ranks construct and call, without alone=True",
    )


def _within_budget(
    pieces: Pieces, roles: NDArray[np.uint8], lazy: Sequence[bool], copied_bytes_max: int
) -> tuple[bool, ...]:
    """If copies of all early pieces would exceed the limit: `lazy`, with parameters captured late too.

    A change of these before their capture is detected, fails that save, and names them.
    """
    copied_bytes = int(pieces.lengths()[~np.array(lazy, np.bool_)].sum())
    if copied_bytes <= copied_bytes_max:
        return tuple(lazy)
    return tuple((np.array(lazy, np.bool_) | np.isin(roles, (Role.UNOWNED, Role.PARAMETER))).tolist())
