"""One description under way, as kinds see it: where tensors go, and what kinds need to know of the whole state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Literal, Protocol, TypeAlias

from flowstone.state import tensors
from flowstone.state.counters import Counters
from flowstone.state.frozen import Frozen
from flowstone.state.inner import stepped_by
from flowstone.state.names import Place
from flowstone.state.parameters import Parameters
from flowstone.state.scan import Scan
from flowstone.state.sink import Role, Sink
from flowstone.table.pieces import Layout, Places

Inner: TypeAlias = "Literal['walked', 'marked', 'refused']"
"""What becomes of an inner object: a load walks to it; a load finds it by its mark; a load could not find it."""


class DescribeWalk(Protocol):
    """Describes a value of any kind: enters its tensors into the sink, and returns the object that represents it."""

    def __call__(self, value: object, place: Place, role: Role = Role.OTHER, /) -> object: ...


class Saving:
    """One description under way.

    scan  what the state contains
    sink  takes tensors
    walk  describes the values inside of a value
    late  functions that fill in providers' small objects, once bytes move; the sink then accepts objects only
    """

    walk: DescribeWalk

    def __init__(self, scan: Scan, sink: Sink) -> None:
        self.scan, self.sink = scan, sink
        self.late: deque[Callable[[], None]] = deque()
        self.inner: Inner = "walked"

    @contextmanager
    def inside(self, inner: Inner) -> Iterator[None]:
        """Describe values that a load makes anew: what becomes of objects among them."""
        outer, self.inner = self.inner, inner
        try:
            yield
        finally:
            self.inner = outer

    @cached_property
    def parameters(self) -> Parameters:
        return self.scan.parameters()

    @cached_property
    def stepped(self) -> frozenset[int]:
        """Ids of parameters that change only in steps of the state's optimizers, which wait at the fence."""
        return frozenset(map(id, chain.from_iterable(map(stepped_by, self.scan.optimizers))))

    def close(
        self, known: Layout | None, frozen: Frozen | None = None, copied_bytes_max: int | None = None
    ) -> tuple[Layout, Places, Counters]:
        """The layout, places and counters, once all has been entered."""
        columns = self.sink.look(hold=True)
        apart = {at: tensors.memory_of(tensors.resolved(self.sink.tensors[at])) for at in columns.odd}
        self.sink.objects_only = True
        layout, places, piece = self.sink.close(columns, apart, known, frozen, copied_bytes_max)
        counters = Counters(self.sink.tensors, columns.owners, columns.address, columns.versions, piece)
        return layout, places, counters
