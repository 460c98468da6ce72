"""Describe: take a state apart into pieces of memory and plain objects. Changes nothing."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import cast

import numpy as np
import torch

from flowstone.format import objects
from flowstone.format.merge_points import MergePoint
from flowstone.format.objects import Provided, TensorRef, tensor_refs, unsupported
from flowstone.state import constants, generators, modules, optimizers, provider_adapter, tensors
from flowstone.state.collector import Collector, Role
from flowstone.state.counters import Counters
from flowstone.state.flat import Flat
from flowstone.state.frozen import Frozen
from flowstone.state.inner import Core, stepped_by
from flowstone.state.kinds import Kind
from flowstone.state.names import PLAIN_KEYS, Place, check_sections, names_below, section_place
from flowstone.state.records import Described, PerRank, Shard
from flowstone.state.scan import (
    Parameters,
    Scan,
    classify,
    gc_paused,
    only_tensors,
    provider_of,
    refuse_failed_call,
    scan,
)
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Layout, Places

BYTES_INLINE_MAX = 64 * 1024
"""Longer bytes lie in a tensor: objects are read whole, as text, whenever a checkpoint is opened."""


@gc_paused()
def describe(
    state: Mapping[str, object], *, rank: int = 0, known: Layout | None = None, whole: bool = False,
    frozen: Frozen | None = None, copied_bytes_max: int | None = None,
) -> Described:
    """Describe everything in `state`, as `rank` holds it.

    known   the layout of an earlier description; it is the result's own, the very object, where nothing differs
    whole   nobody else has a part of it: tensors of which this process holds a part are refused, too
    frozen  what earlier descriptions have seen of parameters that nobody owns; sees it anew
    copied_bytes_max  where the layout is not the known one, what is captured early has to be copied; if that is more
            than so many bytes, parameters that may change at any time are captured late, too
    raises  UnsupportedStateError, naming the path, for what cannot be stored;
            CollisionError when two paths make one name

    Calls the state_dict() of what has one; copies no tensor (but conjugate and negative views),
    changes nothing. Memory in the result is the user's and kept alive by it.
    """
    check_sections(state)
    describer = Describer(scan(state, rank), Collector(whole=whole))
    shared: dict[str, object] = {}
    per_rank: dict[str, object] = {}
    for section, value in state.items():
        if isinstance(value, PerRank):
            per_rank[section] = describer.node(value.value, section_place(section, rank))
        else:
            shared[section] = describer.node(value, section_place(section))
    layout, places, counters = describer.close(known, frozen, copied_bytes_max)
    found = describer.scan
    return Described(
        layout, places, shared, per_rank, found.optimizers, found.unguarded, counters, describer.late
    )


class Describer:
    """One description under way: enters tensors into the collector, returns objects.

    late  what fills in the small objects of providers, once bytes move: then the collector takes objects only
    """

    def __init__(self, found: Scan, collector: Collector | None = None) -> None:
        self.scan = found
        self.collector = collector or Collector()
        self.late: deque[Callable[[], None]] = deque()
        self._open: set[int] = set()

    @cached_property
    def parameters(self) -> Parameters:
        return self.scan.parameters()

    @cached_property
    def stepped(self) -> frozenset[int]:
        """Identities of parameters that optimizers of the state change, and nobody else, after they have waited."""
        return frozenset(map(id, chain.from_iterable(map(stepped_by, self.scan.optimizers))))

    def close(
        self, known: Layout | None, frozen: Frozen | None = None, copied_bytes_max: int | None = None
    ) -> tuple[Layout, Places, Counters]:
        """What was entered, once everything has been."""
        columns = self.collector.look(hold=True)
        apart = {at: tensors.memory_of(tensors.resolved(self.collector.tensors[at])) for at in columns.odd}
        self.collector.objects_only = True
        layout, places, piece = self.collector.close(columns, apart, known, frozen, copied_bytes_max)
        counters = Counters(self.collector.tensors, columns.owners, columns.address, piece)
        return layout, places, counters

    def node(self, value: object, place: Place) -> object:
        """The object that stands for `value`, whose tensors go into the collector."""
        match classify(value):
            case Kind.PLAIN:
                return self._plain(value, place)
            case Kind.CONTAINER:
                return self._container(value, place)
            case Kind.TENSOR:
                self.collector.enter(place, cast("torch.Tensor", value))
                return TensorRef(place.name, "tensor")
            case Kind.ARRAY:
                self.collector.add_array(place, cast("np.ndarray", value))
                return TensorRef(place.name, "ndarray")
            case Kind.SHARD:
                return self._shard(cast("Shard", value), place)
            case Kind.FLAT:
                return self._flat(cast("Flat", value), place)
            case Kind.MODULE:
                return modules.describe(self, cast("torch.nn.Module", value), place)
            case Kind.GENERATOR:
                return self.node(generators.state_of(value, place.name), place)
            case Kind.OPTIMIZER | Kind.STATEFUL:
                core = optimizers.core_at(value, place)
                return self._stateful(value, place) if core is None else self._optimizer(value, core, place)
            case Kind.PROVIDED:
                return self.provided(value, place)
            case Kind.PER_RANK:
                raise unsupported(place.name, value, "lies inside another value", "make it a top-level entry")

    def _optimizer(self, value: object, core: Core, place: Place) -> MergePoint:
        node, base = optimizers.describe(self, core, place), optimizers.base_at(value, core, place)
        if base is not None:
            node["base"] = optimizers.describe(self, base, place.child("base"))
        return node

    def provided(self, value: object, place: Place, role: Role = Role.OTHER) -> Provided:
        """What a provider says of `value`, which as a whole is a tensor of this role."""
        served = provider_of(value)
        assert served is not None, "who asks for it has seen that there is a provider"
        return provider_adapter.describe(self, served, value, place, role)

    def _shard(self, shard: Shard, place: Place) -> TensorRef:
        if isinstance(shard.tensor, torch.Tensor):
            self.collector.enter(place, shard.tensor, within=shard)
            return TensorRef(place.name, "tensor")
        self.collector.add_array(place, shard.tensor, within=shard)
        return TensorRef(place.name, "ndarray")

    def _flat(self, flat: Flat, place: Place) -> dict[str, object]:
        """Enter the members of a flat tensor. Their names say all, as those of a module's parameters do."""
        for span in flat.spans:
            self.collector.enter(
                place.called(f"{place.name}.{span.name}", span.name), span.of(flat.tensor), within=span.range,
                role=Role.STEPPED if id(flat.tensor) in self.stepped else Role.OTHER,
            )
        return {}

    def _stateful(self, value: object, place: Place) -> object:
        try:
            tree = value.state_dict()  # type: ignore[attr-defined]
        except Exception as error:
            raise refuse_failed_call(place, "state_dict", error) from error
        return self.node(tree, place)

    def _container(self, value: object, place: Place) -> object:
        self._enter(value, place)
        built: object
        only = only_tensors(value)
        if only is not None:
            built = self._references(value, place, *only)
        elif isinstance(value, dict):
            pairs = [(self.key(key, place), self.node(item, place.child(key))) for key, item in value.items()]
            built = self._container_type(value)(pairs)
        else:
            items = [self.node(item, place.child(i)) for i, item in enumerate(cast("list[object]", value))]
            built = items if type(value) is list else tuple(items)
        self._open.discard(id(value))
        return built

    def _references(
        self, value: object, place: Place, keys: Sequence[object], values: Sequence[torch.Tensor]
    ) -> object:
        """What stands for a container of nothing but tensors."""
        names = names_below(place.name, keys)
        self.collector.enter_all(place, keys, names, values)
        references = tensor_refs(names)
        if isinstance(value, dict):
            plain = PLAIN_KEYS.issuperset(map(type, keys))
            stored_keys = keys if plain else [self.key(key, place) for key in keys]
            return self._container_type(value)(zip(stored_keys, references, strict=True))
        return references if type(value) is list else tuple(references)

    def _container_type(self, value: object) -> type[dict[object, object]]:
        """What stands for a dict: a MergePoint, where its items are restored one by one."""
        if type(value) is OrderedDict:
            return OrderedDict
        return MergePoint if id(value) in self.scan.live else dict

    def _enter(self, value: object, place: Place) -> None:
        if id(value) in self._open:
            raise unsupported(place.name, value, "contains itself", "break the cycle, or leave it out of the state")
        if len(self._open) >= objects.DEPTH_MAX:
            raise unsupported(place.name, value, f"is nested more than {objects.DEPTH_MAX} levels deep", "flatten it")
        self._open.add(id(value))

    def _plain(self, value: object, place: Place) -> object:
        """A value of its own: immutable ones as they are, others copied, constants by name."""
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        if kind is bytes or kind is bytearray:
            return self._bytes(cast("bytes", value), place)
        if kind is deque:
            return self._deque(cast("deque[object]", value), place)
        if kind in (set, frozenset):
            members = [self.key(item, place) for item in cast("set[object]", value)]
            return kind(members)
        if kind is Counter:
            return self._counter(cast("Counter[object]", value), place)
        named = constants.named(value)
        if named is not None:
            return named
        objects.encode(value, place.name)  # scalars of numpy, slices; refuses everything else
        return value

    def _bytes(self, value: bytes | bytearray, place: Place) -> object:
        if len(value) <= BYTES_INLINE_MAX:
            return type(value)(value)
        # A copy of a bytearray: an exported buffer would keep the user from resizing it.
        array = np.frombuffer(bytes(value), np.uint8)
        self.collector.add(place, DTYPES["uint8"], tensors.array_memory(array))
        return TensorRef(place.name, "bytes" if type(value) is bytes else "bytearray")

    def _deque(self, value: deque[object], place: Place) -> object:
        self._enter(value, place)
        built = deque((self.node(item, place.child(i)) for i, item in enumerate(value)), value.maxlen)
        self._open.discard(id(value))
        return built

    def _counter(self, value: Counter[object], place: Place) -> object:
        self._enter(value, place)
        built: Counter[object] = Counter()
        for key, count in value.items():
            built[self.key(key, place)] = cast("int", self.node(count, place.child(key)))
        self._open.discard(id(value))
        return built

    def key(self, key: object, place: Place) -> object:
        """A dict key or a set's member: a plain, hashable value."""
        if type(key) is str or type(key) is int:
            return key
        if type(key) is tuple:
            return tuple(self.key(part, place) for part in key)
        named = constants.named(key)
        if named is not None:
            return named
        if type(key) is frozenset:
            return frozenset(self.key(part, place) for part in key)
        objects.encode(key, f"{place.name} key {key!r:.40}")
        return key


_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, range})
