"""The pass over a state that lists its tensors and values for a save. Kinds (`kind.py`) add tensors to the pass's sink
(`sink.py`), and read facts about the full state from the pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Literal, Protocol, TypeAlias

from flowstone.state.counters import VersionCounters
from flowstone.state.framework import FRAMEWORK
from flowstone.state.frozen import FrozenParameters
from flowstone.state.names import Place
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole, TensorSink
from flowstone.table.pieces import Layout, Places

Inner: TypeAlias = "Literal['walked', 'marked', 'refused']"
"""How a load finds an object inside of another object's state: by the walk, by a marker, or not at all."""


class DescribeWalk(Protocol):
    """A function that describes a value of any kind for a save: it adds the value's tensors to the sink, and returns
    the form in which the value is stored.
    """

    def __call__(self, value: object, place: Place, role: TensorRole = TensorRole.OTHER, /) -> object: ...


class DescribePass:
    """One pass that describes a state.

    scan  the contents of the state, as the first pass found them
    sink  collects the tensors
    walk  describes one value; kinds call it for the values inside of a value
    inner how objects inside of another object's state are treated
    late  functions that fill in providers' small objects during the capture, when the sink accepts no more tensors
    """

    def __init__(
        self, scan: StateScan, sink: TensorSink, make_walk: Callable[[DescribePass], DescribeWalk],
        inner: Inner = "walked",
    ) -> None:
        self.scan, self.sink, self.inner = scan, sink, inner
        self.late: deque[Callable[[], None]] = deque()
        self.walk = make_walk(self)

    @contextmanager
    def inner_objects_as(self, inner: Inner) -> Iterator[None]:
        """Use the `with` block to describe values that a load will create. `inner` says how to treat the objects among
        them.
        """
        outer, self.inner = self.inner, inner
        try:
            yield
        finally:
            self.inner = outer

    @cached_property
    def stepped(self) -> frozenset[int]:
        """The ids of parameters that change only in optimizer steps, which wait until the parameters are captured."""
        groups = chain.from_iterable(getattr(optimizer, "param_groups", ()) for optimizer in self.scan.optimizers)
        return frozenset(map(id, chain.from_iterable(map(itemgetter("params"), groups))))

    def close(
        self, known: Layout | None, frozen: FrozenParameters | None = None, copied_bytes_max: int | None = None
    ) -> tuple[Layout, Places, VersionCounters]:
        """End the pass. Returns the layout, the memory of its pieces, and the version counters of the tensors."""
        columns = self.sink.columns(hold=True)
        apart = {row: FRAMEWORK.memory_of(FRAMEWORK.resolved(self.sink.tensors[row])) for row in columns.odd}
        self.sink.refuse_tensors()
        layout, places, piece = self.sink.close(columns, apart, known, frozen, copied_bytes_max)
        counters = VersionCounters(self.sink.tensors, columns.owners, columns.address, columns.versions, piece)
        return layout, places, counters
