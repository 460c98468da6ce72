"""What happens to an optimizer's settings and slots (state tensors) if the checkpoint lacks them.

In an optimizer, such settings keep their values, and such slots are removed. In the state dict of an optimizer both are
removed, since old values in it would be mistaken for saved ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowstone.state.loading import RestorePass
from flowstone.state.names import Place
from flowstone.state.records import MISSING
from flowstone.torch.inner_optimizers import Core
from flowstone.torch.state_dict_objects import StateDictOptimizer

_NOT_FLATTENED = (
    "load into the optimizer itself, or into a state dict that is not flattened: torch cannot read a flattened state "
    "dict without all of its entries"
)


def note_options(loading: RestorePass, optimizer: Core, absent: Sequence[str], place: Place) -> bool:
    """Add a note to the load's report about settings of the group at `place` that the checkpoint lacks (`absent`).
    Returns whether they must be removed.
    """
    if isinstance(optimizer, StateDictOptimizer) and optimizer.complete:
        for key in absent:
            loading.add_difference("missing", f"{place.name}.{key}", "a setting", "nothing of that name")
        loading.remedies.append(_NOT_FLATTENED)
        return False
    is_dict = isinstance(optimizer, StateDictOptimizer)
    done = "removed from the state dict" if is_dict else "left unchanged"
    loading.notes.append(f"{place.name}: {', '.join(absent)} not in the checkpoint: {done}")
    return is_dict


def note_slots(
    loading: RestorePass, optimizer: StateDictOptimizer, absent: Mapping[str, Mapping[object, object]], place: Place
) -> None:
    """Add a note to the load's report about slots of a state dict that the checkpoint lacks, and that will be removed.
    `absent`: these slots, by parameter.

    If torch could not read the dict back without these slots, they are requested, and reported as missing tensors.
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
