"""Objects that a provider has the word on: its description is checked, its chunks enter the ledger, its
small objects are taken while bytes move already; at load all of it is compared before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from flowstone.errors import ProviderError
from flowstone.format import objects
from flowstone.format.objects import Provided, RefKind, TensorRef
from flowstone.state.drawn import Drawn
from flowstone.state.fresh import Fresh, kind_of
from flowstone.state.ledger import Role
from flowstone.state.names import Place
from flowstone.state.provider import Part
from flowstone.state.records import MISSING, Phase, Shard
from flowstone.state.registry import Served

if TYPE_CHECKING:
    from flowstone.state.describe import Describer
    from flowstone.state.restore import Restorer


def describe(describer: Describer, served: Served, value: object, place: Place, role: Role) -> Provided:
    """Enter an object's parts; its small objects are filled in later, by what is put into `describer.late`.

    role  what the object is to whatever holds it
    """
    drawn = Drawn(served, value, place)
    found = Provided(served.kind, {}, {})
    for part, chunk in drawn.memory():
        inner = drawn.place_of(part)
        within = None if part.box is None else Shard(chunk, part.shape, part.box.offset)
        own = Role.STEPPED if part.lazy else role
        if isinstance(chunk, torch.Tensor):
            describer.ledger.enter(inner, chunk, within=within, role=own)
        else:
            describer.ledger.add_array(inner, chunk, within=within, role=own)
        found.parts[part.name] = TensorRef(inner.name, _ref_kind(chunk))
    describer.ledger.split.update(drawn.split)
    if drawn.objects:
        describer.late.append(partial(_describe_objects, describer, drawn, found))
    else:
        drawn.end()
    return found


def _describe_objects(describer: Describer, drawn: Drawn, found: Provided) -> None:
    """Take an object's small objects. All tensors have been entered, and bytes move: no more can come."""
    for part, value in drawn.values():
        found.objects[part.name] = drawn.checked(f"gives for '{part.name}' what cannot be stored",
                                                 describer.node, value, drawn.place_of(part))
    drawn.end()


def restore(restorer: Restorer, served: Served, value: object, node: object, place: Place) -> None:
    """Want an object's parts in its own memory, or anew; plan to hand it the rest."""
    if not isinstance(node, Provided) or node.kind != served.kind:
        stored = restorer.stored.tensors
        found = kind_of(node) if node is not MISSING else "a tensor" if place.name in stored else "nothing of that name"
        restorer.differ("missing" if node is MISSING else "kind", place.name, f"'{served.kind}'", found)
        return
    drawn = Drawn(served, value, place)
    fresh = Fresh(restorer)
    anew: dict[str, TensorRef] = {}
    for part, chunk in drawn.memory(writable=True):
        inner, ref = drawn.place_of(part), node.parts.get(part.name, MISSING)
        if part.resizable:
            if part.name not in anew and _fits(restorer, part, ref, inner):
                anew[part.name] = cast("TensorRef", ref)
                fresh.want(ref, inner)
            continue
        within = None if part.box is None else Shard(chunk, part.shape, part.box.offset)
        if isinstance(chunk, torch.Tensor):
            restorer.into_tensor(chunk, ref, inner, within=within)
        else:
            restorer.into_array(chunk, ref, inner, within=within)
    restorer.ledger.split.update(drawn.split)
    if isinstance(value, torch.Tensor):
        restorer.written.append(value)  # a graph that saved it has to notice, too
    _compare_objects(restorer, drawn, node)
    if place.rank is not None:
        for name in node.parts.keys() - {part.name for part in drawn.parts}:
            restorer.differ("unexpected", f"{place.name}.{name}", "nothing of that name", "a tensor")
    for one in drawn.objects:
        if one.name in node.objects and not one.constant:
            fresh.want(node.objects[one.name], drawn.place_of(one))
    restorer.later(Phase.STATEFUL, partial(_hand_over, drawn, fresh, anew, node))


def _fits(restorer: Restorer, part: Part, ref: object, inner: Place) -> bool:
    """Whether a resizable part can take what is stored; if not, that is a difference."""
    name = restorer.stored.rename(ref.name) if isinstance(ref, TensorRef) else inner.name
    found = restorer.stored.tensors.get(name)
    if not isinstance(ref, TensorRef) or found is None:
        restorer.differ("missing", inner.name, f"{part.dtype} of {len(part.shape)} dimensions", "nothing of that name")
        return False
    if found.dtype.name != part.dtype:
        restorer.differ("dtype", inner.name, part.dtype, found.dtype.name)
    elif len(found.shape) != len(part.shape):
        restorer.differ("shape", inner.name, f"{len(part.shape)} dimensions", str(found.shape))
    else:
        return True
    return False


def _compare_objects(restorer: Restorer, drawn: Drawn, node: Provided) -> None:
    """Small objects that are not on both sides, and constants that are not equal, are differences."""
    names = {part.name for part in drawn.objects}
    for one in drawn.objects:
        if one.name not in node.objects:
            restorer.differ("missing", drawn.place_of(one).name, "an object", "nothing of that name")
    for name in node.objects.keys() - names:
        restorer.differ("unexpected", f"{drawn.place.name}.{name}", "nothing of that name", kind_of(node.objects[name]))
    if not any(part.constant for part in drawn.objects):
        drawn.close()
        return
    for part, value in drawn.values():
        inner = drawn.place_of(part)
        if part.constant and part.name in node.objects:
            own = drawn.checked(f"gives for '{part.name}' what cannot be stored", restorer.plain, value, inner)
            mine, stored = (objects.encode(one, inner.name) for one in (own, node.objects[part.name]))
            if mine != stored:
                restorer.differ("kind", inner.name, *_apart(mine, stored))
    drawn.end()


def _apart(mine: object, stored: object) -> tuple[str, str]:
    """Two nodes that differ, as a difference shows them: of dictionaries, at any depth, only what is not the same."""
    if not (isinstance(mine, dict) and isinstance(stored, dict) and mine.keys() == stored.keys()):
        return f"{mine!r:.200}", f"{stored!r:.200}"
    inside = {name: _apart(mine[name], stored[name]) for name in mine if mine[name] != stored[name]}
    return (
        ", ".join(f"{name} {one}" for name, (one, _) in inside.items()),
        ", ".join(f"{name} {other}" for name, (_, other) in inside.items()),
    )


def _hand_over(drawn: Drawn, fresh: Fresh, anew: Mapping[str, TensorRef], node: Provided) -> None:
    """The provider's own part of a load, with every byte in place."""
    place = drawn.place
    found = {name: fresh.build(ref, f"{place.name}.{name}") for name, ref in anew.items()}
    for part in drawn.objects:
        if part.constant:
            continue  # the object has it
        found[part.name] = fresh.build(node.objects[part.name], f"{place.name}.{part.name}")
    try:
        drawn.served.provider.restore(drawn.value, found)
    except Exception as error:
        raise ProviderError(
            f"cannot restore '{place.name}'", provider=drawn.served.title,
            found=f"its restore() raised {type(error).__name__}: {error}",
            next="mend it; tensors in their own memory, and what comes before it in the state, are already restored",
        ) from error


def _ref_kind(chunk: torch.Tensor | np.ndarray) -> RefKind:
    return "tensor" if isinstance(chunk, torch.Tensor) else "ndarray"
