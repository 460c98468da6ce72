"""What the state layer hands over, and the two wrappers that a user puts around values."""

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
from flowstone.table.pieces import Alias, Layout, Pieces, Places

DifferenceKind: TypeAlias = Literal["missing", "unexpected", "shape", "dtype", "kind"]


Redistribute: TypeAlias = Callable[[list[object], int, int], object]
"""What each of the ranks that saved had, our rank, and the number of ranks: what is to be ours."""


class PerRank:
    """A value that every rank keeps for itself, such as its generators; `value` is replaced at load.

    redistribute  called where another number of ranks loads than saved, as `redistribute(states, rank, ranks)`:
                  `states` is what each of them had, in the order of ranks, as plain values (of an object with
                  state_dict, that); what it returns is loaded here. It runs on every rank, and has to distribute the
                  states alike on all. Without it rank r takes what rank r mod N of the N that saved had
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


class Shard:
    """`tensor` is the box at `offset` of a global tensor of `shape`, whose other parts lie on other ranks."""

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
    """A state, taken apart. The memory is the user's: valid until the state is changed.

    layout      what there is: pieces, aliases, and which of them are lazy
    places      parallel to its pieces: where each lies
    optimizers  every optimizer of the state, and inside of those: each may change lazy pieces in its step
    unguarded   names of optimizers that cannot be made to wait: nothing that they change is lazy
    counters    of what lies there, by which changes that escape the fence are found

    What is not bytes comes by `objects` and `per_rank`. Providers make theirs when these are first asked for:
    ask once the bytes of the pieces move, and before the state changes.
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
        """Section to plain values, with TensorRef and Named leaves; none of it is the user's. Raises ProviderError."""
        self._fill_in()
        return self._objects

    @property
    def per_rank(self) -> Mapping[str, object]:
        """The same for sections that this rank keeps for itself."""
        self._fill_in()
        return self._per_rank

    def _fill_in(self) -> None:
        while self._late:
            self._late[0]()  # stays where it is when it fails: nobody gets objects that lack something
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
    """What the index says about a tensor."""

    dtype: DType
    shape: tuple[int, ...]


def _same(name: str) -> str:
    return name


class Stored(msgspec.Struct, frozen=True):
    """What a checkpoint holds, as far as restoring needs it before any byte is read.

    tensors   by name after renames; aliases are there as names of their own
    objects   section -> decoded value, with TensorRef and Named leaves (names before renames)
    per_rank  the same, this rank's entries
    rename    stored tensor name -> name after the rename rules
    tied      alias -> the name it shares memory with, both after renames; lets containers that are
              built anew share what was shared
    by_rank   as `per_rank`, of every rank that saved
    """

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, object]
    per_rank: Mapping[str, object] = msgspec.field(default_factory=dict)
    rename: Callable[[str], str] = _same
    tied: Mapping[str, str] = msgspec.field(default_factory=dict)
    by_rank: Mapping[str, Sequence[object]] = msgspec.field(default_factory=dict)


class Difference(msgspec.Struct, frozen=True):
    """One way in which state and checkpoint do not fit each other."""

    kind: DifferenceKind
    name: str
    expected: str  # by the state
    found: str  # in the checkpoint


class Phase(enum.IntEnum):
    """The order of what finishes a restoration. Whoever may draw random numbers comes before generators."""

    VALUES = 0
    MODULES = 1
    OPTIMIZERS = 2
    STATEFUL = 3
    GENERATORS = 4


class Missing(enum.Enum):
    """No stored object stands where one was looked for; None is a value."""

    MISSING = 0


MISSING = Missing.MISSING
