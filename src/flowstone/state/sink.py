"""The sink: collects every tensor that a walk over the state finds, with its name and its memory.

Tensors are first collected. They are examined together when the walk is over: a state has tens of thousands of tensors,
and it is the first access to each tensor that costs most of the time.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import PACKED_BELOW_BYTES
from flowstone.errors import CollisionError, UnsupportedStateError
from flowstone.format.objects import unsupported_error
from flowstone.state.framework import FRAMEWORK
from flowstone.state.frozen import FrozenParameters
from flowstone.state.memory import Columns, array_memory, ascending, check_array
from flowstone.state.names import Place, check_shared, valid_name
from flowstone.state.records import Shard
from flowstone.table.box import Box
from flowstone.table.dtype import DType
from flowstone.table.pieces import Alias, Layout, Memory, Pieces, Places, TensorColumns

if TYPE_CHECKING:
    from flowstone.state.records import ElementRange


class TensorRole(enum.IntEnum):
    """The role of a tensor in the state: determines when it may change, and whose value is saved if ranks differ."""

    OTHER = enum.auto()  # no parameter and no buffer; may change at any time
    STEPPED = enum.auto()  # changes only in the step of an optimizer of the state, which waits
    UNOWNED = enum.auto()  # a trained model's parameter without an optimizer: frozen if it never changes
    PARAMETER = enum.auto()  # any other parameter; may change at any time: an average, or changed by its module
    BUFFER = enum.auto()  # may change at any time; ranks may have different values; the lowest rank's is saved


class TensorSink:
    """Collects tensors in order. If the same memory is added under a second name, that name becomes an alias."""

    def __init__(self, *, objects_only: bool = False, whole: bool = False) -> None:
        """Begin an empty collection.

        objects_only  refuse all tensors: the values are described only as objects, to be compared with stored ones
        whole         refuse a part of a tensor, because no other rank would save the rest
        """
        self._objects_only, self._whole = objects_only, whole
        self.names: list[str] = []
        self.tensors: list[Any] = []
        self._roles = bytearray()  # for each entry its TensorRole
        self._given: dict[int, tuple[DType, Memory]] = {}
        self._within: dict[int, Shard] = {}
        self._runs: list[tuple[int, Place, Sequence[object] | None]] = []
        self._tied: list[tuple[Place, str]] = []
        self.split: set[str] = set()  # names of tensors of which one object may hold several boxes (regions)

    def refuse_tensors(self) -> None:
        """Refuse tensors from now on, as the capture has begun."""
        self._objects_only = True

    def enter(
        self, place: Place, tensor: object, *, within: Shard | ElementRange | None = None,
        role: TensorRole = TensorRole.OTHER
    ) -> None:
        """Add a tensor under the place's name. `within`: which part of a larger tensor it is; None: all of it."""
        if self._objects_only:
            raise unsupported_error(
                place.name, tensor, "was described as an object, but is a tensor, or as large as one",
                "describe it as a Part",
            )
        if isinstance(within, Shard):
            self._within[len(self.names)] = within
        elif within is not None:
            # Also if there is only one box: another rank may have several, and aliases must be equal on all ranks.
            self.split.add(place.name)
            self.enter_boxes(place, within.cut_boxes(tensor), tensor, role)
            return
        self._runs.append((len(self.names), place, None))
        self.names.append(place.name)
        self.tensors.append(tensor)
        self._roles.append(role)

    def enter_alias(self, place: Place, target: str) -> None:
        """Add the place's name as an alias of the tensor called `target`, for all boxes of that tensor."""
        self._tied.append((place, target))

    def enter_boxes(self, place: Place, held: Sequence[Shard], tensor: object, role: TensorRole) -> None:
        """Add the boxes (regions) that this rank holds of a larger tensor: none, one or several."""
        check_shared(place, tensor)
        if self._whole and not held:
            raise _part(place.name, "no element of it")
        if len(held) > 1:
            self.split.add(place.name)
        for shard in held:
            self.enter(place, shard.tensor, within=shard, role=role)

    def enter_all(
        self, place: Place, keys: Sequence[object], names: Sequence[str], values: Sequence[object], *,
        roles: Sequence[TensorRole] = (),
    ) -> None:
        """Add several tensors of one place. `keys`, `names`, `values`: the key, the full name, and the tensor of each.
        """
        if names:
            if self._objects_only:
                self.enter(place.called(names[0], keys[0]), values[0])
            self._runs.append((len(self.names), place, keys))
            self.names.extend(names)
            self.tensors.extend(values)
            self._roles.extend(roles or repeat(TensorRole.OTHER, len(names)))

    def add(
        self, place: Place, dtype: DType, memory: Memory, *, within: Shard | None = None,
        role: TensorRole = TensorRole.OTHER
    ) -> None:
        """Add memory that belongs to no tensor."""
        self._given[len(self.names)] = (dtype, memory)
        self.enter(place, FRAMEWORK.NO_TENSOR, within=within, role=role)

    def add_array(
        self, place: Place, array: np.ndarray, *, within: Shard | None = None, role: TensorRole = TensorRole.OTHER
    ) -> None:
        """Add a numpy array that is to be saved."""
        dtype = check_array(array, place.name)
        self.add(place, dtype, array_memory(ascending(array)), within=within, role=role)

    def place(self, position: int) -> Place:
        """The place of an entry."""
        start, place, keys = self._runs[bisect_right(self._runs, position, key=lambda run: run[0]) - 1]
        return place if keys is None else place.called(self.names[position], keys[position - start])

    def columns(self, *, hold: bool) -> Columns:
        """Examine every tensor; see `Framework.columns`."""
        return FRAMEWORK.columns(self.tensors, self.names, hold=hold)

    def close(
        self, columns: Columns, apart: Mapping[int, Memory], known: Layout | None = None,
        frozen: FrozenParameters | None = None, copied_bytes_max: int | None = None,
    ) -> tuple[Layout, Places, NDArray[np.int64]]:
        """End the collection. Returns the layout of all entries, the memory of each piece, and for each entry the
        position of its piece (for an alias, of its target's piece).

        apart   the memory of the tensors that `columns.odd` lists
        known   an earlier layout. It is returned if nothing differs; if only `lazy` differs, all else of it is reused
        frozen  the history of parameters that no optimizer owns, from earlier saves
        copied_bytes_max  see `describe`
        raises  CollisionError if two places have the same name, UnsupportedStateError for an invalid name
        """
        dtypes, shapes, address = list(columns.dtypes), list(columns.shapes), columns.address.copy()
        owners = list(columns.owners)
        memory = dict(apart)
        for position, (dtype, given) in self._given.items():
            assert given.device == "cpu", "memory that no tensor owns is on the host"
            dtypes[position], shapes[position] = dtype, given.shape
            memory[position] = given
        for position, own in memory.items():
            address[position], owners[position] = own.address, own.owner
        device, numbers = columns.device, {"cpu": -1, **{name: number for number, name in enumerate(columns.devices)}}
        if columns.devices:  # the copy of a conjugate tensor may be on another device
            device[list(memory)] = [numbers[own.device] for own in memory.values()]
        ties = self._ties(dtypes, shapes, address, memory)
        tensors = TensorColumns(tuple(self.names), tuple(dtypes), tuple(shapes))
        strided = {position: m for position, m in memory.items() if not m.contiguous}
        places = Places(address, strided, owners, device, columns.devices)
        aliases = (
            *(Alias(self.names[position], self.names[first]) for position, first in ties.items()),
            *(Alias(place.name, target) for place, target in self._tied),
        )
        every = range(len(self.names))
        positions = [position for position in every if position not in ties] if ties else every
        boxed = self._boxed(tensors)
        if self._whole:
            _check_whole(boxed)
        pieces, places = boxed.take(positions), places.take(positions)
        roles = self._kept_roles(positions, ties)
        lazy = self._lazy(roles, positions, pieces, places, frozen)
        if buffers := frozenset(np.flatnonzero(roles == TensorRole.BUFFER).tolist()):
            pieces = replace(pieces, tensors=msgspec.structs.replace(pieces.tensors, buffers=buffers))
        layout = Layout(pieces, aliases, lazy)
        if known is None or (known.pieces, known.aliases) != (pieces, aliases):
            self._check_names()
            if copied_bytes_max is not None:
                layout = msgspec.structs.replace(layout, lazy=_within_budget(pieces, roles, lazy, copied_bytes_max))
        else:  # the names equal those of `known`, which were checked before
            layout = known if known.lazy == lazy else msgspec.structs.replace(known, lazy=lazy)
        return layout, places, self._pieces_of(ties)

    def _kept_roles(self, positions: Sequence[int], ties: Mapping[int, int]) -> NDArray[np.uint8]:
        """The role of each piece. If the roles of its names differ: BUFFER if the first name is a buffer, else OTHER.
        """
        roles = np.frombuffer(bytes(self._roles), np.uint8)
        if not ties:
            return roles
        roles = roles.copy()
        for position, first in ties.items():
            if roles[first] not in (roles[position], TensorRole.BUFFER):
                roles[first] = TensorRole.OTHER
        return roles[np.array(positions, np.int64)]

    def _lazy(
        self, roles: NDArray[np.uint8], positions: Sequence[int], pieces: Pieces, places: Places,
        frozen: FrozenParameters | None
    ) -> tuple[bool, ...]:
        """For each piece, whether it is lazy (captured after `save` returns). Lazy pieces are those that only optimizer
        steps change, and frozen ones.
        """
        lazy = roles == TensorRole.STEPPED
        unowned = np.flatnonzero(roles == TensorRole.UNOWNED).tolist()
        unowned = [row for row in unowned if pieces[row].bytes >= PACKED_BELOW_BYTES]
        if unowned and frozen is not None:
            own = [self.tensors[positions[row]] for row in unowned]
            lazy[unowned] = frozen.find_unchanged(pieces.take(unowned), places.take(unowned), own)
        return tuple(lazy.tolist())

    def _pieces_of(self, ties: Mapping[int, int]) -> NDArray[np.int64]:
        is_piece = np.ones(len(self.names), np.bool_)
        is_piece[list(ties)] = False
        position = np.cumsum(is_piece) - 1
        position[list(ties)] = position[list(ties.values())]
        return position

    def _boxed(self, tensors: TensorColumns) -> Pieces:
        """The pieces; shards with their global shapes and boxes."""
        if not self._within:
            return Pieces(tensors)
        shapes, parts = list(tensors.shapes), {}
        for position, shard in self._within.items():
            box = Box(shard.offset, tuple(shapes[position]))
            shapes[position] = shard.shape
            if box != Box.whole(shard.shape):
                parts[position] = box
        return Pieces.cut(msgspec.structs.replace(tensors, shapes=tuple(shapes)), parts)

    def _ties(
        self, dtypes: Sequence[DType], shapes: Sequence[tuple[int, ...]], address: NDArray[np.uint64],
        memory: Mapping[int, Memory],
    ) -> dict[int, int]:
        """Entries that have the same elements in memory as an earlier entry: the entry's position -> the earlier one's.
        """
        ordered = np.sort(address)
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        ties: dict[int, int] = {}
        if not again.any():  # tensors without elements all have the null address, and share no memory
            return ties
        seen: dict[tuple[object, ...], int] = {}
        for position in np.flatnonzero(np.isin(address, again)).tolist():
            if 0 in shapes[position] or self.names[position] in self.split:
                continue  # an alias can only be another name of a full tensor, not of a box
            own = memory.get(position) or FRAMEWORK.memory_of(self.tensors[position])
            shard = self._within.get(position)
            box = None if shard is None else (shard.shape, shard.offset)
            identity = (own.address, own.shape, own.strides_bytes, dtypes[position].name, own.device, box)
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
        names = set(self.names) if self._tied else set()
        for place, target in self._tied:
            if place.name in names:
                raise CollisionError(
                    f"two paths of the state have the same name '{place.name}'",
                    first=place.path, second=f"a tensor that shares the memory of '{target}'",
                    next="rename one of the keys",
                )
        if not valid_name("".join(self.names)):
            wrong = next(name for name in self.names if not valid_name(name))
            raise UnsupportedStateError(
                f"{wrong!r} cannot name a tensor", expected="text of valid UTF-8 without NUL",
                next="rename the key of the state from which this name is made",
            )

    def _are_boxes(self, entry: int, other: int) -> bool:
        """Whether two entries of the same name are boxes of one tensor that one object holds."""
        boxed = entry in self._within and other in self._within and self.names[entry] in self.split
        return boxed and self.place(entry).parent is self.place(other).parent


def _check_whole(pieces: Pieces) -> None:
    """Raise UnsupportedStateError for the first tensor of which this rank holds only a part."""
    held: dict[str, int] = {}
    for row, elements in zip(pieces.parts.tolist(), pieces.part_elements().tolist(), strict=True):
        held[pieces.names[row]] = held.get(pieces.names[row], 0) + elements
    for row, box in pieces.part_boxes():
        if held[pieces.names[row]] < math.prod(pieces.shapes[row]):
            raise _part(pieces.names[row], f"{box} of shape {tuple(pieces.shapes[row])}")


def _part(name: str, extent: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"this process holds only a part of {name!r}; the rest is on other ranks", found=extent,
        next="save it with a Checkpointer that all ranks construct and call, without alone=True",
    )


def _within_budget(
    pieces: Pieces, roles: NDArray[np.uint8], lazy: Sequence[bool], copied_bytes_max: int
) -> tuple[bool, ...]:
    """`lazy`, unchanged if copies of all other (early) pieces fit into `copied_bytes_max`. If not, parameters
    become lazy, too.

    If such a parameter changes before its capture, the save fails and names it.
    """
    copied_bytes = int(pieces.lengths()[~np.array(lazy, np.bool_)].sum())
    if copied_bytes <= copied_bytes_max:
        return tuple(lazy)
    return tuple((np.array(lazy, np.bool_) | np.isin(roles, (TensorRole.UNOWNED, TensorRole.PARAMETER))).tolist())
