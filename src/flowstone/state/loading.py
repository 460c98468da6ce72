"""The pass over a state that plans a load. Kinds call its methods to request memory that is read into, to report
differences, and to register what must be done after the read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowstone.format import objects
from flowstone.format.objects import TensorRef
from flowstone.state.fitting import ContainerFitter
from flowstone.state.framework import FRAMEWORK
from flowstone.state.memory import IndirectTarget, array_memory, ascending, check_array, writable
from flowstone.state.names import Place
from flowstone.state.nodes import describe_node, refers_to_tensors, without_tensors
from flowstone.state.records import MISSING, DifferenceKind, RestorePhase, Shard, StateDifference, StoredState
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole, TensorSink
from flowstone.table.pieces import Alias, Layout, Places

if TYPE_CHECKING:
    from flowstone.state.records import ElementRange

Replacement = Callable[[], object]
"""Makes the value that replaces a value of the state, once all bytes are in place."""

RestoreWalk: TypeAlias = Callable[[object, Place, object], "Replacement | None"]
"""Plans to restore a value of any kind from the stored node at its place."""


class RestorePass:
    """Plans one load. Collects the memory that is to be read into, the differences between state and checkpoint, and
    what must be called after the read.

    state_scan  the contents of the state, as the first pass found them
    stored  the content of the checkpoint
    walk    plans to restore one value; kinds call it for the values that a container holds
    plain   returns the form in which an object of the state would be stored, for comparison; refuses tensors
    is_object  tells whether a value is restored into the existing object
    sink    gets the memory that is to be read into
    """

    def __init__(
        self, scan: StateScan, stored: StoredState, *, make_walk: Callable[[RestorePass], RestoreWalk],
        plain: Callable[[StateScan, object, Place], object], is_object: Callable[[object], bool],
    ) -> None:
        self.state_scan, self.stored = scan, stored
        self.plain, self.is_object = partial(plain, scan), is_object
        self.sink = TensorSink()
        self.differences: list[StateDifference] = []
        self.notes: list[str] = []
        self.remedies: list[str] = []
        self.actions: dict[RestorePhase, list[Callable[[], None]]] = {phase: [] for phase in RestorePhase}
        self.written: list[object] = []  # tensors whose version counters must be incremented, as the load writes them
        self.new_bytes = 0
        self.fitting = ContainerFitter()
        self._only: RestorePhase | None = None
        self._places: dict[int, tuple[Place, object]] = {}
        self._indirect: dict[int, IndirectTarget] = {}
        self.walk = make_walk(self)

    def add_difference(self, kind: DifferenceKind, name: str, expected: str, stored: str) -> None:
        """Record a difference between state and checkpoint."""
        self.differences.append(StateDifference(kind, name, expected, stored))

    def add_unexpected(self, extra: Mapping[str, object], names: Collection[str], place: Place) -> None:
        """Record stored entries that a value of the state lacks. Tensors among these entries are reported later, with
        all other tensors.
        """
        for name, item in extra.items():
            if name not in names and not refers_to_tensors(item):
                self.add_difference("unexpected", f"{place.name}.{name}", "nothing of that name", describe_node(item))

    def defer(self, phase: RestorePhase, action: Callable[[], None]) -> None:
        """Run `action` after all bytes are read, in the given phase of `Restoration.finish`."""
        self.actions[phase if self._only is None else self._only].append(action)

    def restore_inner(self, value: object, node: object, place: Place, phase: RestorePhase) -> None:
        """Plan to restore an object that is inside of another object's state. All of it is restored in the phase
        `phase`, before the outer object.
        """
        outer, self._only = self._only, phase
        try:
            self.walk(value, place, node)
        finally:
            self._only = outer

    def check_same_value(self, value: object, node: object, place: Place) -> None:
        """Check that an object at two places of the state was saved with the same value at both places."""
        first = self.first_conflict(value, node, place)
        if first is not None:
            self.add_difference("kind", place.name, f"the value of '{first.name}', the same object", "another value")

    def first_conflict(self, value: object, node: object, place: Place) -> Place | None:
        """If the same object was found at an earlier place of the state, for which the checkpoint has another value:
        that place. Otherwise None.

        Tensors are not compared.
        """
        first = self._places.setdefault(id(value), (place, node))
        if first[0] is place or node is MISSING or first[1] is MISSING:
            return None
        mine, theirs = (objects.encode(without_tensors(stored), place.name) for stored in (node, first[1]))
        return None if mine == theirs else first[0]

    def count_new(self, length_bytes: int) -> None:
        """Add to the number of bytes that this load has allocated for tensors."""
        self.new_bytes += length_bytes

    def request_new(self, place: Place, made: Any) -> None:
        """Request that stored bytes are read into a tensor or array that Flowstone has just allocated for this load."""
        self.count_new(made.nbytes)
        if isinstance(made, np.ndarray):
            self.sink.add_array(place, made)
        else:
            self.sink.enter(place, made)

    def stored_place(self, node: object, place: Place) -> Place:
        """The place (name and keys) under which a tensor is stored. For per-rank values, it names the rank that saved
        the tensor.
        """
        if place.rank is not None and isinstance(node, TensorRef):
            return place.called(self.stored.rename(node.name), place.key)
        return place

    def request_tensor(
        self, tensor: object, node: object, place: Place, *, within: Shard | ElementRange | None = None
    ) -> None:
        """Request that the stored bytes are read into a tensor's memory. `within`: which part of a larger stored tensor
        the tensor is; None: all of it.
        """
        self.written.append(tensor)
        self.sink.enter(self.stored_place(node, place), tensor, within=within)

    def request_boxes(self, tensor: object, held: Sequence[Shard], node: object, place: Place) -> None:
        """Request the boxes that this rank holds of a sharded tensor."""
        self.written.append(tensor)
        self.sink.enter_boxes(self.stored_place(node, place), held, tensor, TensorRole.OTHER)

    def request_tensors(
        self, place: Place, keys: Sequence[object], names: Sequence[str], values: Sequence[object]
    ) -> None:
        """Request several tensors of one place, each into its own memory. The place must not be per rank."""
        self.written += values
        self.sink.enter_all(place, keys, names, values)

    def close(
        self, untie: Callable[[Sequence[Alias]], Sequence[int]]
    ) -> tuple[Layout, Places, Mapping[int, IndirectTarget]]:
        """End the pass. Returns the requested pieces, the memory that each is read into, and, by position, the state's
        own memory of those pieces that are first read into other memory and then copied: tensors with a conjugate or
        negative bit, and arrays with negative strides.

        untie  a function for tied tensors that were stored with different values: it requests separate memory for those
               that can be replaced in the state, and returns their positions in the sink
        """
        columns = self.sink.columns(hold=False)
        apart, indirect = {}, dict(self._indirect)
        for position in columns.odd:
            tensor = self.sink.tensors[position]
            detour = FRAMEWORK.detour(tensor, columns.dtypes[position])
            if detour is None:
                apart[position] = FRAMEWORK.memory_of(tensor)
            else:
                apart[position], indirect[position], copy_back = detour
                self.defer(RestorePhase.VALUES, copy_back)
        layout, places, of_entry = self.sink.close(columns, apart)
        unlike = [alias for alias in layout.aliases if not self.stored.equal(alias.name, alias.target)]
        untied = untie(unlike) if unlike else ()
        if untied:
            apart = {position: own for position, own in apart.items() if position not in untied}
            layout, places, of_entry = self.sink.close(self.sink.columns(hold=False), apart)
        return layout, places, {int(of_entry[position]): target for position, target in indirect.items()}

    def request_array(
        self, array: np.ndarray, node: object, place: Place, *, within: Shard | None = None
    ) -> Replacement | None:
        """Request that the stored bytes are read into an array. If the array is read-only, they are read into a new
        array, and a Replacement with the new array is returned.
        """
        place = self.stored_place(node, place)
        dtype = check_array(array, place.name)
        own = writable(array)
        made = np.empty(array.shape, array.dtype) if own is None else own
        aside = ascending(made)
        if own is None:
            self.count_new(made.nbytes)
        elif aside is not own:
            self._indirect[len(self.sink.names)] = IndirectTarget(array_memory(own))
            self.defer(RestorePhase.VALUES, partial(np.copyto, own, aside))
        self.sink.add(place, dtype, array_memory(aside), within=within)
        return partial(_read_only, made) if own is None else None


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
