"""Objects with named fields: scanned, described and restored field by field (see `classes.py`)."""

from __future__ import annotations

from functools import partial
from typing import cast

from flowstone.format.objects import ProviderRecord, unsupported_error
from flowstone.state.classes import CLASSES, ClassForm, Fields, form_of, name_of
from flowstone.state.kinds import plain
from flowstone.state.loading import Replacement, RestorePass
from flowstone.state.names import Place
from flowstone.state.nodes import describe_node
from flowstone.state.records import MISSING, RestorePhase
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan


def find(value: object, place: Place, scan: StateScan) -> bool:
    """Scan the fields. Returns whether a load writes something in the object in place (the object is "live")."""
    form, live = _form(value), False
    for name, item in _taken_apart(value, form, place).items():
        if name == form.inline:
            inside = item.items() if isinstance(item, dict) else enumerate(cast("list[object]", item))
            are_live = [scan.walk(item, place.child(key)) for key, item in inside if type(item) not in plain.TYPES]
        else:
            are_live = [scan.walk(item, place.child(name))] if type(item) not in plain.TYPES else []
        live = live or any(are_live)
    if live:
        scan.live.add(id(value))
    return live


def describe(value: object, place: Place, saving: DescribePass) -> ProviderRecord:
    """The stored form of an object: the name of its class, and its fields."""
    form = _form(value)
    fields = _taken_apart(value, form, place)
    if any(type(name) is not str for name in fields):
        raise unsupported_error(place.name, value, "has fields whose names are not text")
    if id(value) not in saving.scan.live:  # else a load restores into an existing object, whose class is known
        CLASSES.warn_unknown(type(value), place)
        factory = getattr(value, "default_factory", None) if isinstance(value, dict) else None
        if factory is not None:
            CLASSES.warn_unknown(factory, place)
    made = {name: saving.walk(item, _place_of(name, form, place)) for name, item in fields.items()}
    return ProviderRecord(name_of(type(value)), {}, made)


def restore(value: object, node: object, place: Place, loading: RestorePass) -> Replacement | None:
    """Replace the object by the stored one; or restore its fields, if something in it is written in place."""
    if id(value) not in loading.state_scan.live:
        return plain.restore(value, node, place, loading, holds_tensors=True)
    loading.check_same_value(value, node, place)
    form, kind = _form(value), name_of(type(value))
    if not isinstance(node, ProviderRecord) or node.kind != kind:
        stored = "nothing of that name" if node is MISSING else describe_node(node)
        loading.add_difference("missing" if node is MISSING else "kind", place.name, f"'{kind}'", stored)
        return None
    fields = _taken_apart(value, form, place)
    if form.inline is not None:
        loading.state_scan.live.add(id(fields[form.inline]))  # the id stays valid: `fields` lives until all is restored
    is_changed = False
    for name, item in fields.items():
        replacement = loading.walk(item, _place_of(name, form, place), node.objects.get(name, MISSING))
        if replacement is not None:
            is_changed = True
            loading.defer(RestorePhase.VALUES, partial(_set, fields, name, replacement))
    for name in node.objects.keys() - fields.keys():
        loading.add_difference(
            "unexpected", f"{place.name}.{name}", "nothing of that name", describe_node(node.objects[name])
        )
    if not is_changed and form.inline is None:
        return None
    if form.is_mutable(value):
        loading.defer(RestorePhase.VALUES, lambda: form.fill(value, fields))
        return None
    return lambda: form.make(type(value), fields)


def _form(value: object) -> ClassForm:
    form = form_of(type(value))
    assert form is not None, "the kind recognises only classes with a form"
    return form


def _taken_apart(value: object, form: ClassForm, place: Place) -> Fields:
    """The fields of a value. Raises UnsupportedStateError if it cannot be taken apart."""
    try:
        return form.fields(value)
    except Exception as error:
        raise unsupported_error(place.name, value, f"cannot be taken apart: {type(error).__name__}: {error}") from error


def _place_of(name: str, form: ClassForm, place: Place) -> Place:
    return place if name == form.inline else place.child(name)


def _set(fields: Fields, name: str, replacement: Replacement) -> None:
    fields[name] = replacement()
