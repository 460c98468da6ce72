"""Settings and slots of an optimizer that the checkpoint to be loaded does not have.

An optimizer keeps its own settings, and loses its slots. A state dict of an optimizer keeps neither: old values in it
would be mistaken for saved ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowstone.state.inner import Core
from flowstone.state.loading import Loading
from flowstone.state.names import Place
from flowstone.state.records import MISSING
from flowstone.state.state_dict_objects import StateDictOptimizer

_NOT_FLATTENED = (
    "load into the optimizer itself, or into a state dict that is not flattened: torch cannot read a flattened one "
    "without all of its entries"
)


def note_options(loading: Loading, optimizer: Core, absent: Sequence[str], place: Place) -> bool:
    """Note settings of the group at `place` that the checkpoint does not have. Returns whether to remove them."""
    if isinstance(optimizer, StateDictOptimizer) and optimizer.complete:
        for key in absent:
            loading.differ("missing", f"{place.name}.{key}", "a setting", "nothing of that name")
        loading.remedies.append(_NOT_FLATTENED)
        return False
    is_dict = isinstance(optimizer, StateDictOptimizer)
    done = "removed from the state dict" if is_dict else "left as is"
    loading.notes.append(f"{place.name}: {', '.join(absent)} not in the checkpoint: {done}")
    return is_dict


def note_slots(
    loading: Loading, optimizer: StateDictOptimizer, absent: Mapping[str, Mapping[object, object]], place: Place
) -> None:
    """Note slots of a state dict that the checkpoint does not have, by parameter: they are going to be removed.

    If torch cannot read the dict back without them, they are requested, and so reported as missing tensors.
    """
    if not absent:
        return
    if optimizer.complete:
        inside = place.child("state")
        for path, slots in absent.items():
            for slot, value in slots.items():
                loading.walk(value, inside.called(f"{inside.name}.{path}.{slot}", (path, slot)), MISSING)
        loading.remedies.append(_NOT_FLATTENED)
        return
    loading.notes.append(
        f"{place.name}: the checkpoint has no {_slots_of(absent)}: removed from the state dict. Pass "
        "StateDictOptions(strict=False) to set_optimizer_state_dict()"
    )


def _slots_of(absent: Mapping[str, Mapping[object, object]]) -> str:
    return listing([f"{slot} of {path}" for path, slots in absent.items() for slot in slots])


def listing(names: Sequence[str]) -> str:
    """The first three names, for a message."""
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
