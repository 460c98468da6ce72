"""Objects with a registered Provider: its description is checked, its chunks enter the sink, and its small objects
are taken while bytes already move; a load compares all of it before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import numpy as np
import torch

from flowstone.errors import ProviderError
from flowstone.format import objects
from flowstone.format.objects import RefKind, TensorRef
from flowstone.state.kind import Kind
from flowstone.state.loading import Loading
from flowstone.state.names import Place
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import kind_of
from flowstone.state.provider import Part
from flowstone.state.provider_session import ProviderSession
from flowstone.state.providers import PROVIDERS, Served
from flowstone.state.records import MISSING, Phase, Shard
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role


class Provided(Kind):
    """An object that a provider describes. If it is a tensor, it has a role as a whole: an optimizer may own it."""

    one_value = True
    provided = True

    def served(self, value: object) -> Served | None:
        """The provider of a value; None if it has none."""
        return PROVIDERS.of_type(type(value))

    def recognises(self, value: object) -> bool:
        return self.served(value) is not None

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        if isinstance(value, torch.Tensor):
            scan.tensors.append((place, None, [value]))
        return True

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> objects.Provided:
        served = self.served(value)
        assert served is not None, "that is what the kind says"
        return describe(served, value, place, saving, role)

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> None:
        served = self.served(value)
        assert served is not None, "that is what the kind says"
        restore(served, value, node, place, loading)


def describe(served: Served, value: object, place: Place, saving: Saving, role: Role) -> objects.Provided:
    """Enter an object's parts; a function in `saving.late` fills in its small objects later.

    role  of the object, in the object that contains it
    """
    session = ProviderSession(served, value, place)
    found = objects.Provided(served.kind, {}, {})
    for part, chunk in session.memory():
        inner = session.place_of(part)
        within = None if part.box is None else Shard(chunk, part.shape, part.box.offset)
        own = Role.STEPPED if part.lazy else role
        if isinstance(chunk, torch.Tensor):
            saving.sink.enter(inner, chunk, within=within, role=own)
        else:
            saving.sink.add_array(inner, chunk, within=within, role=own)
        found.parts[part.name] = TensorRef(inner.name, _ref_kind(chunk))
    saving.sink.split.update(session.split)
    if session.objects:
        saving.late.append(partial(_describe_objects, saving, session, found))
    else:
        session.end()
    return found


def _describe_objects(saving: Saving, session: ProviderSession, found: objects.Provided) -> None:
    """Take an object's small objects. All tensors have been entered, and bytes move: no more tensors may come."""
    with saving.inside("refused"):
        for part, value in session.values():
            found.objects[part.name] = session.checked(
                f"gives '{part.name}' a value that cannot be stored", saving.walk, value, session.place_of(part)
            )
    session.end()


def restore(served: Served, value: object, node: object, place: Place, loading: Loading) -> None:
    """Request an object's parts in its own memory, or in new memory; plan to pass it the rest."""
    if not isinstance(node, objects.Provided) or node.kind != served.kind:
        stored = loading.stored.tensors
        found = kind_of(node) if node is not MISSING else "a tensor" if place.name in stored else "nothing of that name"
        loading.differ("missing" if node is MISSING else "kind", place.name, f"'{served.kind}'", found)
        return
    session = ProviderSession(served, value, place)
    new_values = NewValues(loading)
    anew: dict[str, TensorRef] = {}
    for part, chunk in session.memory(writable=True):
        inner, ref = session.place_of(part), node.parts.get(part.name, MISSING)
        if part.resizable:
            if part.name not in anew and _fits(loading, part, ref, inner):
                anew[part.name] = cast("TensorRef", ref)
                new_values.want(ref, inner)
            continue
        within = None if part.box is None else Shard(chunk, part.shape, part.box.offset)
        if isinstance(chunk, torch.Tensor):
            loading.into_tensor(chunk, ref, inner, within=within)
        else:
            loading.into_array(chunk, ref, inner, within=within)
    loading.sink.split.update(session.split)
    if isinstance(value, torch.Tensor):
        loading.written.append(value)  # a graph that saved it must notice the write too
    _compare_objects(loading, session, node)
    if place.rank is not None:
        for name in node.parts.keys() - {part.name for part in session.parts}:
            loading.differ("unexpected", f"{place.name}.{name}", "nothing of that name", "a tensor")
    for one in session.objects:
        if one.name in node.objects and not one.constant:
            new_values.want(node.objects[one.name], session.place_of(one))
    loading.later(Phase.STATEFUL, partial(_hand_over, session, new_values, anew, node))


def _fits(loading: Loading, part: Part, ref: object, inner: Place) -> bool:
    """Whether a resizable part can take the stored tensor; if not, note a difference."""
    name = loading.stored.rename(ref.name) if isinstance(ref, TensorRef) else inner.name
    found = loading.stored.tensors.get(name)
    if not isinstance(ref, TensorRef) or found is None:
        loading.differ("missing", inner.name, f"{part.dtype} of {len(part.shape)} dimensions", "nothing of that name")
        return False
    if found.dtype.name != part.dtype:
        loading.differ("dtype", inner.name, part.dtype, found.dtype.name)
    elif len(found.shape) != len(part.shape):
        loading.differ("shape", inner.name, f"{len(part.shape)} dimensions", str(found.shape))
    else:
        return True
    return False


def _compare_objects(loading: Loading, session: ProviderSession, node: objects.Provided) -> None:
    """Note differences: small objects that only one side has, and constants that are not equal."""
    names = {part.name for part in session.objects}
    for one in session.objects:
        if one.name not in node.objects:
            loading.differ("missing", session.place_of(one).name, "an object", "nothing of that name")
    for name in node.objects.keys() - names:
        loading.differ(
            "unexpected", f"{session.place.name}.{name}", "nothing of that name", kind_of(node.objects[name])
        )
    if not any(part.constant for part in session.objects):
        session.close()
        return
    for part, value in session.values():
        inner = session.place_of(part)
        if part.constant and part.name in node.objects:
            own = session.checked(f"gives '{part.name}' a value that cannot be stored", loading.plain, value, inner)
            mine, stored = (objects.encode(one, inner.name) for one in (own, node.objects[part.name]))
            if mine != stored:
                loading.differ("kind", inner.name, *_apart(mine, stored))
    session.end()


def _apart(mine: object, stored: object) -> tuple[str, str]:
    """Two different nodes, for a difference: of dictionaries, at any depth, only the entries that differ."""
    if not (isinstance(mine, dict) and isinstance(stored, dict) and mine.keys() == stored.keys()):
        return f"{mine!r:.200}", f"{stored!r:.200}"
    inside = {name: _apart(mine[name], stored[name]) for name in mine if mine[name] != stored[name]}
    return (
        ", ".join(f"{name} {one}" for name, (one, _) in inside.items()),
        ", ".join(f"{name} {other}" for name, (_, other) in inside.items()),
    )


def _hand_over(
    session: ProviderSession, new_values: NewValues, anew: Mapping[str, TensorRef], node: objects.Provided
) -> None:
    """Call the provider's `restore`, with every byte in place."""
    place = session.place
    found = {name: new_values.build(ref, f"{place.name}.{name}") for name, ref in anew.items()}
    for part in session.objects:
        if part.constant:
            continue  # the object has that value already
        found[part.name] = new_values.build(node.objects[part.name], f"{place.name}.{part.name}")
    try:
        session.served.provider.restore(session.value, found)
    except Exception as error:
        raise ProviderError(
            f"cannot restore '{place.name}'", provider=session.served.title,
            found=f"its restore() raised {type(error).__name__}: {error}",
            next="fix it; tensors loaded in place, and what comes before it in the state, are already restored",
        ) from error


def _ref_kind(chunk: torch.Tensor | np.ndarray) -> RefKind:
    return "tensor" if isinstance(chunk, torch.Tensor) else "ndarray"
