"""New values: built from a stored object, for values that cannot be written in place."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np
import torch

from flowstone.errors import DamagedError, ProviderError
from flowstone.format.inner_objects import INNER
from flowstone.format.objects import Named, Provided, TensorRef
from flowstone.state import constants, tensors
from flowstone.state.constants import constant_free
from flowstone.state.loading import Loading
from flowstone.state.names import Place
from flowstone.state.nodes import kind_of
from flowstone.state.providers import PROVIDERS
from flowstone.state.records import MISSING, Phase, StoredTensor
from flowstone.state.split import SplitTensor

Placement = Callable[[StoredTensor], "torch.device | str"]


class NewValues:
    """New memory for the tensors that one object refers to; a name that occurs twice, or a tied one, is one tensor.

    First call `want` with every node, before any byte is read; then, with all bytes in place, `build`.
    """

    def __init__(
        self, loading: Loading, placement: Placement | None = None, phase: Phase = Phase.STATEFUL
    ) -> None:
        """`phase`: in which they are built; objects inside of them are restored in it."""
        self._loading = loading
        self._placement = placement
        self._phase = phase
        self._live: dict[int, object] = {}  # by id of the node: objects that are restored where they are
        self._made: dict[str, torch.Tensor | np.ndarray] = {}
        self._names: dict[str, str] = {}

    def want(self, node: object, place: Place, live: object = MISSING) -> None:
        """Allocate the tensors that `node` refers to, and request them. Missing tensors become differences.

        live  the value that the new one is going to replace: objects in it stay, and are restored
        """
        if live is not MISSING and isinstance(node, dict | TensorRef | Provided) and self._loading.is_object(live):
            self._live[id(node)] = live
            self._loading.restore_inner(live, node, place, self._phase)
        elif isinstance(node, TensorRef):
            self._want_ref(node, place)
        elif isinstance(node, Provided):
            self._want_provided(node, place, live)
        elif isinstance(node, dict):
            for key, item in node.items():
                self.want(item, place.child(key), _item(live, constant_free(key, place.name)))
        elif isinstance(node, (list, tuple, deque)):
            for i, item in enumerate(node):
                self.want(item, place.child(i), _item(live, i))
        else:
            constant_free(node, place.name)  # only for its errors, which must come before bytes are read

    def _want_provided(self, node: Provided, place: Place, live: object) -> None:
        served = PROVIDERS.of_kind(node.kind)
        if node.kind == INNER:
            there = "a value" if live is not MISSING else "nothing of that name"
            self._loading.differ("kind", place.name, f"no object to restore into: {there}", kind_of(node))
            self._loading.remedies.append(f"make the object that belongs at '{place.name}' before the load")
            return
        if served is not None and not served.provider.creates and PROVIDERS.of_type(type(live)) is served:
            self._live[id(node)] = live
            self._loading.restore_inner(live, node, place, self._phase)
            return
        if served is None and not node.parts:
            from flowstone.state.classes import form_of_node  # imported here: most states have no such objects

            form = form_of_node(node)
            if form is not None:
                for name, item in node.objects.items():
                    inside = live if name == form.inline else getattr(live, name, MISSING)
                    self.want(item, place if name == form.inline else place.child(name), inside)
                return
        if served is None or not served.provider.creates:
            why = "is not registered" if served is None else "cannot create one"
            expected = f"an object there, or a provider that creates '{node.kind}'"
            if served is None and not node.parts:
                why, expected = "or class is not registered", f"{expected}, or its class by fs.register_class()"
            self._loading.differ("kind", place.name, expected, f"{kind_of(node)}, whose provider {why}")
            return
        split = isinstance(served.provider, SplitTensor)
        refusal = cast("SplitTensor", served.provider).refuses(node.objects.get("outer")) if split else None
        if refusal is not None:
            found = f"{kind_of(node)}, which cannot be created: {refusal}"
            self._loading.differ("kind", place.name, "a tensor there", found)
            return
        for name, item in [*node.parts.items(), *node.objects.items()]:
            self.want(item, place.called(f"{place.name}.{name}", name))

    def _want_ref(self, ref: TensorRef, place: Place) -> None:
        stored = self._loading.stored
        name = stored.rename(ref.name)
        if name in self._names:
            return
        if name not in stored.tensors:
            self._loading.differ("missing", name, f"a tensor, for '{place.name}'", "none of that name")
            return
        shares = stored.tied.get(name, name)
        self._names[name] = shares
        made = self._made.get(shares)
        if made is None:
            made = self._made[shares] = self._new(stored.tensors[name], ref, place)
        self._loading.want(place.called(name, place.key), made)

    def _new(self, stored: StoredTensor, ref: TensorRef, place: Place) -> torch.Tensor | np.ndarray:
        if ref.kind == "tensor":
            return tensors.empty(
                stored.dtype, stored.shape, device="cpu" if self._placement is None else self._placement(stored)
            )
        is_bytes = ref.kind != "ndarray"
        if not tensors.numpy_has(stored.dtype) or (is_bytes and (stored.dtype.name, len(stored.shape)) != ("uint8", 1)):
            raise DamagedError(
                f"the object '{place.name}' does not match its type",
                expected="bytes" if is_bytes else "a numpy array",
                found=f"{stored.dtype.name} of shape {stored.shape}",
                next="run `flowstone verify`; load another checkpoint",
            )
        return np.empty(stored.shape, stored.dtype.name)

    def build(self, node: object, path: str) -> object:
        """The value of a node that was passed to `want`. Containers are new, constants those of this torch and numpy.
        """
        kind = type(node)
        if id(node) in self._live:
            return self._live[id(node)]
        if kind is TensorRef:
            return self._built_ref(cast("TensorRef", node))
        if kind is Provided:
            return self._built_provided(cast("Provided", node), path)
        if kind is Named:
            return constants.value_of(cast("Named", node), path)
        if kind in (dict, OrderedDict):
            pairs = [
                (constant_free(key, path), self.build(item, path))
                for key, item in cast("dict[object, object]", node).items()
            ]
            return OrderedDict(pairs) if kind is OrderedDict else dict(pairs)
        if kind is Counter:
            counter: Counter[object] = Counter()
            for key, count in cast("Counter[object]", node).items():
                counter[constant_free(key, path)] = cast("int", self.build(count, path))
            return counter
        if kind is deque:
            line = cast("deque[object]", node)
            return deque((self.build(item, path) for item in line), line.maxlen)
        if kind in (list, tuple):
            items = [self.build(item, path) for item in cast("list[object]", node)]
            return items if kind is list else tuple(items)
        if kind is bytearray:
            return bytearray(cast("bytearray", node))
        return constant_free(node, path)

    def _built_provided(self, node: Provided, path: str) -> object:
        served = PROVIDERS.of_kind(node.kind)
        if served is None:
            from flowstone.state.classes import make

            return make(node, lambda item: self.build(item, path))
        items = [*node.parts.items(), *node.objects.items()]
        found = {name: self.build(item, f"{path}.{name}") for name, item in items}
        try:
            return served.provider.create(found)
        except Exception as error:
            raise ProviderError(
                f"cannot restore '{path}'", provider=served.title,
                found=f"its create() raised {type(error).__name__}: {error}",
                next="fix it; tensors loaded in place, and what comes before it in the state, are already restored",
            ) from error

    def _built_ref(self, ref: TensorRef) -> object:
        made = self._made[self._names[self._loading.stored.rename(ref.name)]]
        if ref.kind == "bytes":
            return cast("np.ndarray", made).tobytes()
        if ref.kind == "bytearray":
            return bytearray(cast("np.ndarray", made).tobytes())
        return made


def _item(live: object, key: object) -> object:
    """What a live container has under the key of a stored one."""
    if isinstance(live, Mapping):
        return live.get(key, MISSING)
    if isinstance(live, list | tuple) and type(key) is int and key < len(live):
        return live[key]
    return MISSING
