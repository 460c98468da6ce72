"""New values: built from a stored object, for values that cannot be written in place."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from flowstone.errors import DamagedError, ProviderError
from flowstone.format.inner_objects import INNER
from flowstone.format.objects import NamedConstant, ProviderRecord, TensorRef
from flowstone.state import constants
from flowstone.state.constants import resolve_constants
from flowstone.state.framework import FRAMEWORK
from flowstone.state.loading import RestorePass
from flowstone.state.memory import numpy_has
from flowstone.state.names import Place
from flowstone.state.nodes import describe_node
from flowstone.state.provider_registry import PROVIDERS
from flowstone.state.records import MISSING, RestorePhase, TensorSpec

Placement = Callable[[TensorSpec], object]
"""The device of a new tensor."""


class NewValues:
    """Makes new values from the stored form of one object, with new memory for its tensors. A name that occurs
    repeatedly gets one tensor. Tied tensors (names of the same memory) get one tensor together.

    Call `request` with every stored value before any byte is read. Once all bytes are read, call `build`.
    """

    def __init__(
        self, loading: RestorePass, placement: Placement | None = None, phase: RestorePhase = RestorePhase.STATEFUL
    ) -> None:
        """`phase`: the phase in which the values are built, and objects inside of them restored."""
        self._loading = loading
        self._placement = placement
        self._phase = phase
        self._live: dict[int, object] = {}  # id of a stored value -> existing object into which it is restored
        self._made: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def request(self, node: object, place: Place, live: object = MISSING) -> None:
        """Allocate the tensors to which `node` refers, and request them. Tensors that are not stored are recorded as
        differences between state and checkpoint.

        live  the value that the new one replaces; objects in it are kept and restored
        """
        if live is not MISSING and isinstance(
            node, dict | TensorRef | ProviderRecord
        ) and self._loading.is_object(live):
            self._live[id(node)] = live
            self._loading.restore_inner(live, node, place, self._phase)
        elif isinstance(node, TensorRef):
            self._request_ref(node, place)
        elif isinstance(node, ProviderRecord):
            self._request_provided(node, place, live)
        elif isinstance(node, dict):
            for key, item in node.items():
                self.request(item, place.child(key), _item(live, resolve_constants(key, place.name)))
        elif isinstance(node, (list, tuple, deque)):
            for i, item in enumerate(node):
                self.request(item, place.child(i), _item(live, i))
        else:
            resolve_constants(node, place.name)  # called because it may raise, which must happen before bytes are read

    def _request_provided(self, node: ProviderRecord, place: Place, live: object) -> None:
        entry = PROVIDERS.find_for_kind(node.kind)
        if node.kind == INNER:
            there = "a value of another kind" if live is not MISSING else "nothing of that name"
            expected = f"an object to restore into, but the state has {there}"
            self._loading.add_difference("kind", place.name, expected, describe_node(node))
            self._loading.remedies.append(f"create the object at '{place.name}' before the load")
            return
        if entry is not None and not entry.provider.creates and PROVIDERS.find_for_type(type(live)) is entry:
            self._live[id(node)] = live
            self._loading.restore_inner(live, node, place, self._phase)
            return
        if entry is None and not node.parts:
            from flowstone.state.classes import form_of_node  # imported here: most states have no such objects

            form = form_of_node(node)
            if form is not None:
                for name, item in node.objects.items():
                    inside = live if name == form.inline else getattr(live, name, MISSING)
                    self.request(item, place if name == form.inline else place.child(name), inside)
                return
        if entry is None or not entry.provider.creates:
            why = "is not registered" if entry is None else "cannot create objects"
            expected = f"an object in the state, or a provider that creates '{node.kind}'"
            if entry is None and not node.parts:
                why, expected = "or class is not registered", f"{expected}, or its class given to fs.register_class()"
            self._loading.add_difference("kind", place.name, expected, f"{describe_node(node)}, whose provider {why}")
            return
        refusal = entry.refusal(node.objects)
        if refusal is not None:
            stored = f"{describe_node(node)}, which cannot be created: {refusal}"
            self._loading.add_difference("kind", place.name, "a tensor in the state", stored)
            return
        for name, item in [*node.parts.items(), *node.objects.items()]:
            self.request(item, place.called(f"{place.name}.{name}", name))

    def _request_ref(self, ref: TensorRef, place: Place) -> None:
        stored = self._loading.stored
        name = stored.rename(ref.name)
        if name in self._names:
            return
        if name not in stored.tensors:
            self._loading.add_difference("missing", name, f"a tensor, for '{place.name}'", "none of that name")
            return
        shares = stored.tied.get(name, name)
        self._names[name] = shares
        made = self._made.get(shares)
        if made is None:
            made = self._made[shares] = self._new(stored.tensors[name], ref, place)
        self._loading.request_new(place.called(name, place.key), made)

    def _new(self, stored: TensorSpec, ref: TensorRef, place: Place) -> Any:
        if ref.kind == "tensor":
            return FRAMEWORK.empty(
                stored.dtype, stored.shape, device="cpu" if self._placement is None else self._placement(stored)
            )
        is_bytes = ref.kind != "ndarray"
        if not numpy_has(stored.dtype) or (is_bytes and (stored.dtype.name, len(stored.shape)) != ("uint8", 1)):
            raise DamagedError(
                f"the stored object '{place.name}' is invalid",
                expected="bytes" if is_bytes else "a numpy array",
                found=f"{stored.dtype.name} of shape {stored.shape}",
                next="run `flowstone verify`; load another checkpoint",
            )
        return np.empty(stored.shape, stored.dtype.name)

    def build(self, node: object, path: str) -> object:
        """Make the value of a node that was passed to `request`, with new containers."""
        kind = type(node)
        if id(node) in self._live:
            return self._live[id(node)]
        if kind is TensorRef:
            return self._built_ref(cast("TensorRef", node))
        if kind is ProviderRecord:
            return self._built_provided(cast("ProviderRecord", node), path)
        if kind is NamedConstant:
            return constants.constant_of(cast("NamedConstant", node), path)
        if kind in (dict, OrderedDict):
            pairs = [
                (resolve_constants(key, path), self.build(item, path))
                for key, item in cast("dict[object, object]", node).items()
            ]
            return OrderedDict(pairs) if kind is OrderedDict else dict(pairs)
        if kind is Counter:
            counter: Counter[object] = Counter()
            for key, count in cast("Counter[object]", node).items():
                counter[resolve_constants(key, path)] = cast("int", self.build(count, path))
            return counter
        if kind is deque:
            line = cast("deque[object]", node)
            return deque((self.build(item, path) for item in line), line.maxlen)
        if kind in (list, tuple):
            items = [self.build(item, path) for item in cast("list[object]", node)]
            return items if kind is list else tuple(items)
        if kind is bytearray:
            return bytearray(cast("bytearray", node))
        return resolve_constants(node, path)

    def _built_provided(self, node: ProviderRecord, path: str) -> object:
        entry = PROVIDERS.find_for_kind(node.kind)
        if entry is None:
            from flowstone.state.classes import make_object

            return make_object(node, lambda item: self.build(item, path))
        items = [*node.parts.items(), *node.objects.items()]
        values = {name: self.build(item, f"{path}.{name}") for name, item in items}
        try:
            return entry.provider.create(values)
        except Exception as error:
            raise ProviderError(
                f"cannot restore '{path}'", provider=entry.title,
                found=f"its create() raised {type(error).__name__}: {error}",
                next="fix this create(), and load again before you save: the state is only partly loaded (all tensors "
                "that are loaded in place, and the objects before this one, have the checkpoint's values; the rest "
                "may still have its old values)",
            ) from error

    def _built_ref(self, ref: TensorRef) -> object:
        made = self._made[self._names[self._loading.stored.rename(ref.name)]]
        if ref.kind == "bytes":
            return cast("np.ndarray", made).tobytes()
        if ref.kind == "bytearray":
            return bytearray(cast("np.ndarray", made).tobytes())
        return made


def _item(live: object, key: object) -> object:
    """The item of the state's container `live` with a stored key; MISSING if there is none."""
    if isinstance(live, Mapping):
        return live.get(key, MISSING)
    if isinstance(live, list | tuple) and type(key) is int and key < len(live):
        return live[key]
    return MISSING
