"""Records that the state layer returns, and the two wrappers that a user puts around values."""

from __future__ import annotations

import enum
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import torch

from flowstone.errors import UnsupportedStateError
from flowstone.state.counters import Counters
from flowstone.table.dtype import DType
from flowstone.table.pieces import Alias, Layout, Memory, Pieces, Places

DifferenceKind: TypeAlias = Literal["missing", "unexpected", "shape", "dtype", "kind"]


Redistribute: TypeAlias = Callable[[list[object], int, int], object]
"""Called with the values of all ranks that saved, this rank, the number of ranks; returns this rank's value."""


class PerRank:
    """A value that each rank has for itself, such as its generators; `value` is replaced at load.

    redistribute  called if the number of ranks differs from the save's, as `redistribute(states, rank, ranks)`:
                  `states` are the ranks' values in rank order, as plain values (for an object with state_dict, that);
                  the returned one is loaded here. It runs on every rank, and must divide the states in the same way
                  on all. Without it, rank r takes the value of rank r mod N of the N that saved
    """

    __slots__ = ("redistribute", "value")

    def __init__(self, value: object, *, redistribute: Redistribute | None = None) -> None:
        if redistribute is not None and not callable(redistribute):
            raise UnsupportedStateError(
                f"redistribute={redistribute!r:.60} is not callable",
                next="give a function: redistribute(states, rank, ranks)"
            )
        self.value = value
        self.redistribute = redistribute

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class IndirectTarget(msgspec.Struct, frozen=True, eq=False):
    """Memory of the state whose values are read to other memory first.

    is_conj, is_neg  how the memory has them: conjugate, negated
    """

    memory: Memory
    is_conj: bool = False
    is_neg: bool = False


class Shard:
    """`tensor` is the box at `offset` of a global tensor of `shape`; other ranks hold the other parts."""

    __slots__ = ("offset", "shape", "tensor")

    def __init__(self, tensor: torch.Tensor | np.ndarray, shape: Sequence[int], offset: Sequence[int]) -> None:
        self.tensor = tensor
        try:
            self.shape, self.offset = tuple(map(operator.index, shape)), tuple(map(operator.index, offset))
            if not isinstance(tensor, torch.Tensor | np.ndarray):
                raise TypeError("no tensor")
        except TypeError:
            raise UnsupportedStateError(
                "a shard takes a tensor, the global shape, and the offset of the tensor in it",
                found=f"Shard({type(tensor).__qualname__}, {shape!r:.40}, {offset!r:.40})",
                next="write fs.Shard(tensor, (4096, 1024), (1024, 0)): one whole number for each dimension",
            ) from None
        local = tuple(tensor.shape)
        fits = len(local) == len(self.shape) == len(self.offset) and all(
            o >= 0 and o + n <= whole for o, n, whole in zip(self.offset, local, self.shape, strict=True)
        )
        if not fits:
            raise UnsupportedStateError(
                f"a shard of shape {local} at offset {self.offset} does not fit into a tensor of shape {self.shape}",
                next="give the global shape, and the offset of the shard's first element in it",
            )

    def __repr__(self) -> str:
        return f"Shard(<{tuple(self.tensor.shape)}>, shape={self.shape}, offset={self.offset})"


class Described(msgspec.Struct, frozen=True, eq=False):
    """A state, taken apart. The memory is the user's: valid until the state changes.

    layout      the pieces, the aliases, and which pieces are lazy
    places      parallel to its pieces: the memory of each
    optimizers  every optimizer of the state, inner ones too: each may change lazy pieces in its step
    unguarded   names of optimizers that cannot be made to wait: nothing that they change is lazy
    counters    version counters of the tensors, which show changes that escape the fence

    Values that are not tensors are in `objects` and `per_rank`. Providers create theirs at the first access:
    access them once the bytes of the pieces move, and before the state changes.
    """

    layout: Layout
    places: Places
    _objects: Mapping[str, object]
    _per_rank: Mapping[str, object]
    optimizers: tuple[object, ...]
    unguarded: tuple[str, ...]
    counters: Counters
    _late: deque[Callable[[], None]] = msgspec.field(default_factory=deque)

    @property
    def objects(self) -> Mapping[str, object]:
        """Section to plain values, with TensorRef and Named leaves; copies, not the user's objects. Raises
        ProviderError.
        """
        self._fill_in()
        return self._objects

    @property
    def per_rank(self) -> Mapping[str, object]:
        """The same for per-rank sections."""
        self._fill_in()
        return self._per_rank

    def _fill_in(self) -> None:
        while self._late:
            self._late[0]()  # stays in the list if it fails, so that incomplete objects are never returned
            self._late.popleft()

    @property
    def pieces(self) -> Pieces:
        return self.layout.pieces

    @property
    def aliases(self) -> tuple[Alias, ...]:
        return self.layout.aliases

    @property
    def lazy(self) -> tuple[bool, ...]:
        return self.layout.lazy


class StoredTensor(msgspec.Struct, frozen=True):
    """The index entry of a tensor."""

    dtype: DType
    shape: tuple[int, ...]


def _same(name: str) -> str:
    return name


def _nowhere(_: str) -> Sequence[str]:
    return ()


def _never(_: str) -> bool:
    return False


class Stored(msgspec.Struct, frozen=True):
    """The content of a checkpoint, as far as restoring needs it before any byte is read.

    tensors   by name after renames; aliases are included as names of their own
    objects   section -> decoded value, with TensorRef and Named leaves (names before renames)
    per_rank  the same, this rank's entries
    rename    stored tensor name -> name after the rename rules
    tied      alias -> the name with which it shares memory, both after renames; so that new containers share what
              was shared
    equal     whether two names are known to have the same stored bytes; True also where one is not stored
    by_rank   as `per_rank`, for every rank that saved
    moved     stored tensor name -> the names of what rules make of it; none: the one that `rename` gives
    may_be_left    whether a rule lets the state not have an entry of that name
    may_be_absent  whether a rule lets the checkpoint not have it
    """

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, object]
    per_rank: Mapping[str, object] = msgspec.field(default_factory=dict)
    rename: Callable[[str], str] = _same
    tied: Mapping[str, str] = msgspec.field(default_factory=dict)
    equal: Callable[[str, str], bool] = lambda *_: True
    by_rank: Mapping[str, Sequence[object]] = msgspec.field(default_factory=dict)
    moved: Callable[[str], Sequence[str]] = _nowhere
    may_be_left: Callable[[str], bool] = _never
    may_be_absent: Callable[[str], bool] = _never


class Difference(msgspec.Struct, frozen=True):
    """One difference between state and checkpoint."""

    kind: DifferenceKind
    name: str
    expected: str  # in the state
    found: str  # in the checkpoint


class Phase(enum.IntEnum):
    """The order of actions that finish a restoration. Code that may draw random numbers runs before generators."""

    VALUES = 0
    MODULES = 1
    OPTIMIZERS = 2
    STATEFUL = 3
    GENERATORS = 4


class Missing(enum.Enum):
    """No stored object exists at a place; None is a value."""

    MISSING = 0


MISSING = Missing.MISSING
