"""One restoration being planned, as kinds see it: requested memory, differences, and actions after the bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import torch

from flowstone.format import objects
from flowstone.format.objects import TensorRef
from flowstone.state import tensors
from flowstone.state.fitting import Fitting
from flowstone.state.flat import Range
from flowstone.state.names import Place
from flowstone.state.nodes import kind_of, refers_to_tensors, without_tensors
from flowstone.state.parameters import Parameters
from flowstone.state.records import MISSING, Difference, DifferenceKind, IndirectTarget, Phase, Shard, Stored
from flowstone.state.scan import Scan
from flowstone.state.sink import Role, Sink
from flowstone.table.pieces import Alias, Layout, Places

Replacement = Callable[[], object]
"""Makes the value that replaces another one in its container, once all bytes are in place."""

RestoreWalk: TypeAlias = Callable[[object, Place, object], "Replacement | None"]
"""Plans to restore a value of any kind from the stored node at its place."""


class Loading:
    """One restoration being planned: collects requested memory, differences and later actions.

    scan    what the state contains
    stored  the content of the checkpoint
    walk    plans to restore the values inside of a value
    plain   an object of the state in the form that a checkpoint has; refuses tensors
    is_object  whether a value is restored into the object that is there
    sink    collects the requested memory
    """

    walk: RestoreWalk
    plain: Callable[[object, Place], object]
    is_object: Callable[[object], bool]

    def __init__(self, scan: Scan, stored: Stored) -> None:
        self.scan = scan
        self.stored = stored
        self.sink = Sink()
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        self.remedies: list[str] = []
        self.actions: dict[Phase, list[Callable[[], None]]] = {phase: [] for phase in Phase}
        self.written: list[torch.Tensor] = []
        self.new_bytes = 0
        self.fitting = Fitting()
        self._only: Phase | None = None
        self._places: dict[int, tuple[Place, object]] = {}
        self._indirect: dict[int, IndirectTarget] = {}

    @cached_property
    def parameters(self) -> Parameters:
        return self.scan.parameters()

    def differ(self, kind: DifferenceKind, name: str, expected: str, found: str) -> None:
        """Note a difference between state and checkpoint."""
        self.differences.append(Difference(kind, name, expected, found))

    def differ_extra(self, extra: Mapping[str, object], names: Collection[str], place: Place) -> None:
        """Note stored entries that a value does not have. Tensors among them are reported with all other tensors."""
        for name, item in extra.items():
            if name not in names and not refers_to_tensors(item):
                self.differ("unexpected", f"{place.name}.{name}", "nothing of that name", kind_of(item))

    def later(self, phase: Phase, action: Callable[[], None]) -> None:
        """Run `action` in `finish`."""
        self.actions[phase if self._only is None else self._only].append(action)

    def restore_inner(self, value: object, node: object, place: Place, phase: Phase) -> None:
        """Plan to restore an object inside of another one's state: all of it in the `phase` of that one, before it."""
        outer, self._only = self._only, phase
        try:
            self.walk(value, place, node)
        finally:
            self._only = outer

    def check_once(self, value: object, node: object, place: Place) -> None:
        """Check that an object at two places of the state was saved with the same value at both: it can take only one.
        """
        first = self.first_unlike(value, node, place)
        if first is not None:
            self.differ("kind", place.name, f"as in '{first.name}', which is the same object", "another value")

    def first_unlike(self, value: object, node: object, place: Place) -> Place | None:
        """Return where the same object was met first, if the checkpoint has another value there; else None.

        Tensors are not compared.
        """
        first = self._places.setdefault(id(value), (place, node))
        if first[0] is place or node is MISSING or first[1] is MISSING:
            return None
        mine, theirs = (objects.encode(without_tensors(one), place.name) for one in (node, first[1]))
        return None if mine == theirs else first[0]

    def want(self, place: Place, made: torch.Tensor | np.ndarray) -> None:
        """Request memory that the library has allocated."""
        self.new_bytes += made.nbytes
        if isinstance(made, torch.Tensor):
            self.sink.enter(place, made)
        else:
            self.sink.add_array(place, made)

    def named(self, node: object, place: Place) -> Place:
        """The place under which a tensor is stored: its own; per rank, that of the rank that saved it."""
        if place.rank is not None and isinstance(node, TensorRef):
            return place.called(self.stored.rename(node.name), place.key)
        return place

    def into_tensor(
        self, tensor: torch.Tensor, node: object, place: Place, *, within: Shard | Range | None = None
    ) -> None:
        """Request a tensor's elements, in its own memory."""
        self.written.append(tensor)
        self.sink.enter(self.named(node, place), tensor, within=within)

    def into_boxes(self, tensor: torch.Tensor, held: Sequence[Shard], node: object, place: Place) -> None:
        """Request the boxes that this rank holds of a sharded tensor."""
        self.written.append(tensor)
        self.sink.enter_boxes(self.named(node, place), held, tensor, Role.OTHER)

    def into_copy(self, tensor: torch.Tensor, dtype: torch.dtype, node: object, place: Place) -> None:
        """Request a tensor's elements in another dtype; they are cast when all are in place."""
        aside = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        self.into_tensor(aside, node, place)
        self.later(Phase.VALUES, partial(_copy_into, tensor, aside))

    def into_tensors(
        self, place: Place, keys: Sequence[object], names: Sequence[str], values: Sequence[torch.Tensor]
    ) -> None:
        """Request tensors of one place that is not per rank, each in its own memory."""
        self.written += values
        self.sink.enter_all(place, keys, names, values)

    def close(
        self, untie: Callable[[Sequence[Alias]], Sequence[int]]
    ) -> tuple[Layout, Places, Mapping[int, IndirectTarget]]:
        """The requested pieces and memory, once all are known, and the memory of pieces that is set later: of lazily
        negated or conjugated tensors, and of arrays that run backwards.

        untie  requests memory of its own for aliases that are stored with other values than their targets, as far as
               the state may have it; returns their positions in the sink
        """
        columns = self.sink.look(hold=False)
        apart, indirect = {}, dict(self._indirect)
        for position in columns.odd:
            tensor = self.sink.tensors[position]
            memory = apart[position] = tensors.memory_of(tensor)
            if tensors.deferred(tensor):
                aside = tensors.empty(columns.dtypes[position], tensor.shape, device=tensor.device)
                self.later(Phase.VALUES, partial(_copy_into, tensor, aside))
                apart[position] = tensors.memory_of(aside)
                indirect[position] = IndirectTarget(memory, tensor.is_conj(), tensor.is_neg())
        layout, places, of_entry = self.sink.close(columns, apart)
        unlike = [alias for alias in layout.aliases if not self.stored.equal(alias.name, alias.target)]
        untied = untie(unlike) if unlike else ()
        if untied:
            apart = {position: memory for position, memory in apart.items() if position not in untied}
            layout, places, of_entry = self.sink.close(self.sink.look(hold=False), apart)
        return layout, places, {int(of_entry[position]): one for position, one in indirect.items()}

    def into_array(
        self, array: np.ndarray, node: object, place: Place, *, within: Shard | None = None
    ) -> Replacement | None:
        """Request that an array is filled; of a read-only one, that a new array is, which is returned to replace it."""
        place = self.named(node, place)
        dtype = tensors.check_array(array, place.name)
        own = tensors.writable(array)
        made = np.empty(array.shape, array.dtype) if own is None else own
        aside = tensors.ascending(made)
        if own is None:
            self.new_bytes += made.nbytes
        elif aside is not own:
            self._indirect[len(self.sink.names)] = IndirectTarget(tensors.array_memory(own))
            self.later(Phase.VALUES, partial(np.copyto, own, aside))
        self.sink.add(place, dtype, tensors.array_memory(aside), within=within)
        return partial(_read_only, made) if own is None else None


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements into a tensor; where some share memory, torch refuses copy_(), and the values are equal."""
    with torch.no_grad():
        for dim, stride in enumerate(target.stride()):
            if stride == 0 and target.numel():  # expanded
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        if not target.numel() or not tensors.overlaps_itself(tensors.memory_of(target)):
            target.copy_(source)
            return
        reach = sum((side - 1) * step for side, step in zip(target.shape, target.stride(), strict=True)) + 1
        flat = target.as_strided((reach,), (1,), target.storage_offset())
        at = torch.arange(reach, device=target.device).as_strided(target.shape, target.stride())
        flat[at.reshape(-1)] = source.reshape(-1)
