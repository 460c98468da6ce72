"""Saves and loads objects with a registered Provider. A save checks the provider's description, adds the memory of its
parts to the tensors to be captured, and takes its small objects while tensors are captured. A load compares everything
before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import numpy as np

from flowstone.errors import ProviderError
from flowstone.format import objects
from flowstone.format.objects import RefKind, TensorRef
from flowstone.providers.provider import Part
from flowstone.providers.provider_session import ProviderSession
from flowstone.state.framework import FRAMEWORK
from flowstone.state.kind import ValueKind
from flowstone.state.loading import RestorePass
from flowstone.state.names import Place
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import describe_node
from flowstone.state.provider_registry import PROVIDERS, ProviderEntry
from flowstone.state.records import MISSING, RestorePhase, Shard
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole


class ProvidedKind(ValueKind):
    """An object that a provider describes.

    Each part has a TensorRole, which says when it may change, and whose value is saved. Lazy parts (`Part.lazy`), which
    the provider declares to change only in optimizer steps or after `fence()`, have the role STEPPED. All
    other parts have the role of the object, which is OTHER unless the object is a tensor.
    """

    one_value = True
    provided = True

    def find_provider(self, value: object) -> ProviderEntry | None:
        """The provider of a value; None if it has none."""
        return PROVIDERS.find_for_type(type(value))

    def recognises(self, value: object) -> bool:
        return self.find_provider(value) is not None

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        if FRAMEWORK.is_tensor(value):
            scan.tensors.append((place, None, [value]))
        return True

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> objects.ProviderRecord:
        """Add an object's parts to the tensors of the save. Its small objects are described later, by a function that
        is added to `saving.late`.
        """
        entry = self.find_provider(value)
        assert entry is not None, "the kind recognises only values with a provider"
        session = ProviderSession(entry, value, place)
        node = objects.ProviderRecord(entry.kind, {}, {})
        for part, chunk in session.iterate_chunks():
            inner = session.place_of(part)
            within = None if part.box is None else Shard(chunk, part.shape, part.box.offset)
            own = TensorRole.STEPPED if part.lazy else role
            if isinstance(chunk, np.ndarray):
                saving.sink.add_array(inner, chunk, within=within, role=own)
            else:
                saving.sink.enter(inner, chunk, within=within, role=own)
            node.parts[part.name] = TensorRef(inner.name, _ref_kind(chunk))
        saving.sink.split.update(session.split)
        if session.objects:
            saving.late.append(partial(_describe_objects, saving, session, node))
        else:
            session.check_exhausted()
        return node

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> None:
        """Plan the load of an object: its parts are read into its own memory, or into new memory if they are resizable;
        its provider gets all other values at the end.
        """
        entry = self.find_provider(value)
        assert entry is not None, "the kind recognises only values with a provider"
        if not isinstance(node, objects.ProviderRecord) or node.kind != entry.kind:
            stored = loading.stored.tensors
            other = "a tensor" if place.name in stored else "nothing of that name"
            if node is not MISSING:
                other = describe_node(node)
            loading.add_difference("missing" if node is MISSING else "kind", place.name, f"'{entry.kind}'", other)
            return
        session = ProviderSession(entry, value, place)
        new_values = NewValues(loading)
        anew: dict[str, TensorRef] = {}
        for part, chunk in session.iterate_chunks(writable=True):
            inner, ref = session.place_of(part), node.parts.get(part.name, MISSING)
            if part.resizable:
                if part.name not in anew and _fits(loading, part, ref, inner):
                    anew[part.name] = cast("TensorRef", ref)
                    new_values.request(ref, inner)
                continue
            within = None if part.box is None else Shard(chunk, part.shape, part.box.offset)
            if isinstance(chunk, np.ndarray):
                loading.request_array(chunk, ref, inner, within=within)
            else:
                loading.request_tensor(chunk, ref, inner, within=within)
        loading.sink.split.update(session.split)
        if FRAMEWORK.is_tensor(value):
            loading.written.append(value)  # so that an autograd graph that saved this tensor notices the write
        _compare_objects(loading, session, node)
        if place.rank is not None:
            for name in node.parts.keys() - {part.name for part in session.parts}:
                loading.add_difference("unexpected", f"{place.name}.{name}", "nothing of that name", "a tensor")
        for object_part in session.objects:
            if object_part.name in node.objects and not object_part.constant:
                new_values.request(node.objects[object_part.name], session.place_of(object_part))
        loading.defer(RestorePhase.STATEFUL, partial(_hand_over, session, new_values, anew, node))


def _describe_objects(saving: DescribePass, session: ProviderSession, node: objects.ProviderRecord) -> None:
    """Take the provider's small objects, after all tensors of the state were listed. They must contain no tensors."""
    with saving.inner_objects_as("refused"):
        for part, value in session.iterate_objects():
            node.objects[part.name] = session.check_object(
                f"gives '{part.name}' a value that cannot be stored", saving.walk, value, session.place_of(part)
            )
    session.check_exhausted()


def _fits(loading: RestorePass, part: Part, ref: object, inner: Place) -> bool:
    """Whether the stored tensor fits a resizable part. If it does not, a difference is recorded."""
    name = loading.stored.rename(ref.name) if isinstance(ref, TensorRef) else inner.name
    stored = loading.stored.tensors.get(name)
    if not isinstance(ref, TensorRef) or stored is None:
        loading.add_difference(
            "missing", inner.name, f"{part.dtype} of {len(part.shape)} dimensions", "nothing of that name"
        )
        return False
    if stored.dtype.name != part.dtype:
        loading.add_difference("dtype", inner.name, part.dtype, stored.dtype.name)
    elif len(stored.shape) != len(part.shape):
        loading.add_difference("shape", inner.name, f"{len(part.shape)} dimensions", str(stored.shape))
    else:
        return True
    return False


def _compare_objects(loading: RestorePass, session: ProviderSession, node: objects.ProviderRecord) -> None:
    """Record differences: small objects that only one side has, and constants that are not equal."""
    names = {part.name for part in session.objects}
    for object_part in session.objects:
        if object_part.name not in node.objects:
            loading.add_difference("missing", session.place_of(object_part).name, "an object", "nothing of that name")
    for name in node.objects.keys() - names:
        loading.add_difference(
            "unexpected", f"{session.place.name}.{name}", "nothing of that name", describe_node(node.objects[name])
        )
    if not any(part.constant for part in session.objects):
        session.close()
        return
    for part, value in session.iterate_objects():
        inner = session.place_of(part)
        if part.constant and part.name in node.objects:
            own = session.check_object(
                f"gives '{part.name}' a value that cannot be stored", loading.plain, value, inner
            )
            mine, stored = (objects.encode(item, inner.name) for item in (own, node.objects[part.name]))
            if mine != stored:
                loading.add_difference("kind", inner.name, *_apart(mine, stored))
    session.check_exhausted()


def _apart(mine: object, stored: object) -> tuple[str, str]:
    """The texts of two different values, for a message about their difference. Of dictionaries, also nested ones, only
    entries that differ are shown.
    """
    if not (isinstance(mine, dict) and isinstance(stored, dict) and mine.keys() == stored.keys()):
        return f"{mine!r:.200}", f"{stored!r:.200}"
    inside = {name: _apart(mine[name], stored[name]) for name in mine if mine[name] != stored[name]}
    return (
        ", ".join(f"{name} {text}" for name, (text, _) in inside.items()),
        ", ".join(f"{name} {text}" for name, (_, text) in inside.items()),
    )


def _hand_over(
    session: ProviderSession, new_values: NewValues, anew: Mapping[str, TensorRef], node: objects.ProviderRecord
) -> None:
    """Call the provider's `restore`, after all bytes are in place."""
    place = session.place
    values = {name: new_values.build(ref, f"{place.name}.{name}") for name, ref in anew.items()}
    for part in session.objects:
        if part.constant:
            continue  # the object already has this value, as the load has checked
        values[part.name] = new_values.build(node.objects[part.name], f"{place.name}.{part.name}")
    try:
        session.entry.provider.restore(session.value, values)
    except Exception as error:
        raise ProviderError(
            f"cannot restore '{place.name}'", provider=session.entry.title,
            found=f"its restore() raised {type(error).__name__}: {error}",
            next="fix this restore(), and load again before you save: the state is only partly loaded (all tensors "
            "that are loaded in place, and the objects before this one, have the checkpoint's values; the rest may "
            "still have its old values)",
        ) from error


def _ref_kind(chunk: object) -> RefKind:
    return "ndarray" if isinstance(chunk, np.ndarray) else "tensor"
