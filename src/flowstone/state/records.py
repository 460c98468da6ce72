"""The objects that this folder returns to other folders, and PerRank and Shard, which users put around values."""

from __future__ import annotations

import enum
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from flowstone.errors import UnsupportedStateError
from flowstone.state.counters import VersionCounters
from flowstone.state.framework import FRAMEWORK
from flowstone.table.dtype import DType
from flowstone.table.pieces import Alias, Layout, Pieces, Places

if TYPE_CHECKING:
    import torch

    class ElementRange(Protocol):
        """A range of consecutive elements of a larger tensor, which consists of several boxes (regions)."""

        def cut_boxes(self, local: Any, /) -> list[Shard]:
            """The range as boxes; each is a view of `local`, a tensor with the elements of the range."""


DifferenceKind: TypeAlias = Literal["missing", "unexpected", "shape", "dtype", "kind"]
Redistribute: TypeAlias = Callable[[list[object], int, int], object]
"""A function of the values of all ranks that saved, this rank and the number of ranks; returns this rank's value."""


class PerRank:
    """A value that each rank has for itself, such as its random number generators. A load replaces `value`.

    redistribute  a function that is called as `redistribute(states, rank, ranks)` if the checkpoint was saved by
                  another number of ranks. `states` are the saved values in rank order, as plain values (for an object,
                  its state_dict). The function returns what is loaded on rank `rank`. It runs on every rank, and must
                  divide the states in the same way on all. Without it, rank r loads the value of rank r mod N, if N
                  ranks have saved
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

    def replace_value(self, value: object) -> None:
        """Called by a load."""
        self.value = value


class Shard:
    """Says that `tensor` is only a region of a global tensor of `shape`: the one that begins at `offset`. Other ranks
    hold the other regions.
    """

    __slots__ = ("offset", "shape", "tensor")

    def __init__(self, tensor: torch.Tensor | np.ndarray, shape: Sequence[int], offset: Sequence[int]) -> None:
        self.tensor = tensor
        try:
            self.shape, self.offset = tuple(map(operator.index, shape)), tuple(map(operator.index, offset))
            if not (isinstance(tensor, np.ndarray) or FRAMEWORK.is_tensor(tensor)):
                raise TypeError("the first argument is not a tensor")
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

    def replace_array(self, array: np.ndarray) -> None:
        """Set `tensor` to a new array. Called by a load if the existing array is read-only."""
        self.tensor = array


class StateDescription(msgspec.Struct, frozen=True, eq=False):
    """The tensors and all other values of a state, for a save. The memory belongs to the user, and must not change
    before it is captured.

    layout      the pieces, the aliases, and which pieces are lazy
    places      the memory of each of these pieces
    optimizers  every optimizer of the state, inner ones included, as each may change lazy pieces in its step
    unguarded   names of optimizers that cannot be made to wait; what they change is not captured lazily
    counters    version counters of the tensors, which show changes that did not wait for the capture

    Values that are not tensors are in `objects` and `per_rank`. Providers create their values when these attributes are
    first read: read them once the capture has begun, and before the state changes.
    """

    layout: Layout
    places: Places
    _objects: Mapping[str, object]
    _per_rank: Mapping[str, object]
    optimizers: tuple[object, ...]
    unguarded: tuple[str, ...]
    counters: VersionCounters
    _late: deque[Callable[[], None]] = msgspec.field(default_factory=deque)

    @property
    def objects(self) -> Mapping[str, object]:
        """Section -> its values in the form in which they are stored: copies, with TensorRef for tensors and
        NamedConstant for constants. Raises ProviderError.
        """
        self._fill_in()
        return self._objects

    @property
    def per_rank(self) -> Mapping[str, object]:
        """Like `objects`, for sections with one value per rank."""
        self._fill_in()
        return self._per_rank

    def _fill_in(self) -> None:
        while self._late:
            self._late[0]()  # removed from the list only if it succeeds, so that incomplete objects are never returned
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


class TensorSpec(msgspec.Struct, frozen=True):
    """The index entry of a tensor."""

    dtype: DType
    shape: tuple[int, ...]


def _same(name: str) -> str:
    return name


def _nowhere(_: str) -> Sequence[str]:
    return ()


def _never(_: str) -> bool:
    return False


class StoredState(msgspec.Struct, frozen=True):
    """The content of a checkpoint, as far as restoring needs it before any byte is read.

    tensors   the tensors by their names after Rename rules, aliases included
    objects   section -> its stored value, with TensorRef for tensors (by their names before renames) and NamedConstant
              for constants
    per_rank  like `objects`, for this rank's values of sections with one value per rank
    rename    returns for a stored tensor's name its name after the Rename rules
    tied      alias -> the name of the tensor with which it shares memory, both after renames; tensors that a load
              creates share memory in the same way
    equal     tells whether two names are known to have the same stored bytes; also True if one is not stored
    by_rank   like `per_rank`, for every rank that saved
    moved     returns for a stored tensor's name the names of the tensors that layout rules make from it; empty: no
              layout rule applies, see `rename`
    may_be_left    tells whether a rule allows that the state lacks an entry of that name
    may_be_absent  tells whether a rule allows that the checkpoint lacks an entry of that name
    """

    tensors: Mapping[str, TensorSpec]
    objects: Mapping[str, object]
    per_rank: Mapping[str, object] = msgspec.field(default_factory=dict)
    rename: Callable[[str], str] = _same
    tied: Mapping[str, str] = msgspec.field(default_factory=dict)
    equal: Callable[[str, str], bool] = lambda *_: True
    by_rank: Mapping[str, Sequence[object]] = msgspec.field(default_factory=dict)
    moved: Callable[[str], Sequence[str]] = _nowhere
    may_be_left: Callable[[str], bool] = _never
    may_be_absent: Callable[[str], bool] = _never


class StateDifference(msgspec.Struct, frozen=True):
    """One difference between state and checkpoint."""

    kind: DifferenceKind
    name: str
    expected: str  # what the state has
    stored: str  # what the checkpoint has


class RestorePhase(enum.IntEnum):
    """The order in which values are restored after all bytes are read. Generators come last, so that no later code
    draws random numbers.
    """

    VALUES = 0
    MODULES = 1
    OPTIMIZERS = 2
    STATEFUL = 3
    GENERATORS = 4


class MissingType(enum.Enum):
    """The type of MISSING, which says that the checkpoint has no object at a place. (None may be a stored value.)"""

    MISSING = 0


MISSING = MissingType.MISSING
