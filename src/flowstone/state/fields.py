"""Objects with named fields: found, described and restored field by field, as `classes.py` takes them apart."""

from __future__ import annotations

from functools import partial
from typing import cast

from flowstone.format.objects import Provided, unsupported
from flowstone.state.classes import CLASSES, Fields, Form, form_of, name_of
from flowstone.state.kinds import plain
from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import Place
from flowstone.state.nodes import kind_of
from flowstone.state.records import MISSING, Phase
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan


def find(value: object, place: Place, scan: Scan) -> bool:
    """Scan the fields. Returns whether the object is live."""
    form, live = _form(value), False
    for name, item in _taken_apart(value, form, place).items():
        if name == form.inline:
            inside = item.items() if isinstance(item, dict) else enumerate(cast("list[object]", item))
            found = [scan.walk(one, place.child(key)) for key, one in inside if type(one) not in plain.TYPES]
        else:
            found = [scan.walk(item, place.child(name))] if type(item) not in plain.TYPES else []
        live = live or any(found)
    if live:
        scan.live.add(id(value))
    return live


def describe(value: object, place: Place, saving: Saving) -> Provided:
    """The object for a value: the name of its class, and its fields."""
    form = _form(value)
    fields = _taken_apart(value, form, place)
    if any(type(name) is not str for name in fields):
        raise unsupported(place.name, value, "has fields whose names are not text")
    if id(value) not in saving.scan.live:  # of those that are, the live state has one
        CLASSES.warn_unknown(type(value), place)
        factory = getattr(value, "default_factory", None) if isinstance(value, dict) else None
        if factory is not None:
            CLASSES.warn_unknown(factory, place)
    made = {name: saving.walk(item, _place_of(name, form, place)) for name, item in fields.items()}
    return Provided(name_of(type(value)), {}, made)


def restore(value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
    """Replace the object by the stored one; or, with something in it to write in place, restore its fields."""
    if id(value) not in loading.scan.live:
        return plain.restore(value, node, place, loading, holds_tensors=True)
    loading.check_once(value, node, place)
    form, kind = _form(value), name_of(type(value))
    if not isinstance(node, Provided) or node.kind != kind:
        found = "nothing of that name" if node is MISSING else kind_of(node)
        loading.differ("missing" if node is MISSING else "kind", place.name, f"'{kind}'", found)
        return None
    fields = _taken_apart(value, form, place)
    if form.inline is not None:
        loading.scan.live.add(id(fields[form.inline]))  # `fields` lives until all is restored
    is_changed = False
    for name, item in fields.items():
        replacement = loading.walk(item, _place_of(name, form, place), node.objects.get(name, MISSING))
        if replacement is not None:
            is_changed = True
            loading.later(Phase.VALUES, partial(_set, fields, name, replacement))
    for name in node.objects.keys() - fields.keys():
        loading.differ("unexpected", f"{place.name}.{name}", "nothing of that name", kind_of(node.objects[name]))
    if not is_changed and form.inline is None:
        return None
    if form.changes(value):
        loading.later(Phase.VALUES, lambda: form.fill(value, fields))
        return None
    return lambda: form.make(type(value), fields)


def _form(value: object) -> Form:
    form = form_of(type(value))
    assert form is not None, "that is what the kind says"
    return form


def _taken_apart(value: object, form: Form, place: Place) -> Fields:
    """The fields of a value. Raises UnsupportedStateError for one that cannot be taken apart."""
    try:
        return form.fields(value)
    except Exception as error:
        raise unsupported(place.name, value, f"cannot be taken apart: {type(error).__name__}: {error}") from error


def _place_of(name: str, form: Form, place: Place) -> Place:
    return place if name == form.inline else place.child(name)


def _set(fields: Fields, name: str, replacement: Replacement) -> None:
    fields[name] = replacement()
