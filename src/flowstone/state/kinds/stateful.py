"""Objects with state_dict() and load_state_dict() that no earlier kind of `registry.py` recognises, such as schedulers.
What is stored is the tree that state_dict() returns.
"""

from __future__ import annotations

from collections.abc import Collection

from flowstone.errors import StateError
from flowstone.state.imported import class_if_imported
from flowstone.state.kind import ValueKind
from flowstone.state.loading import Replacement, RestorePass
from flowstone.state.names import Place
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import describe_node, holds_provided
from flowstone.state.records import MISSING, RestorePhase
from flowstone.state.saving import DescribePass
from flowstone.state.scan import failed_call_error, failure_facts
from flowstone.state.sink import TensorRole

_VERBS = ("state_dict", "load_state_dict")


class StatefulKind(ValueKind):
    """An object that is saved by its state_dict(), and restored by its load_state_dict(), after modules and optimizers.
    """

    one_value = True
    is_object = True

    def recognises(self, value: object) -> bool:
        return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in _VERBS)

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> object:
        tree = state_of(value, place)
        with saving.inner_objects_as("marked"):
            return saving.walk(tree, place)

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> Replacement | None:
        if node is MISSING:
            loading.add_difference("missing", place.name, describe_node(value), "nothing of that name")
            return None
        new_values = NewValues(loading, phase=RestorePhase.STATEFUL)
        has_objects = holds_provided(node) or _is_scheduler(value)
        new_values.request(node, place, state_of(value, place) if has_objects else MISSING)
        loading.defer(RestorePhase.STATEFUL, lambda: load_state(value, new_values.build(node, place.name), place))
        return None

    def takes_state(self, value: object) -> bool:
        return True


def state_of(value: object, place: Place) -> object:
    """The result of an object's state_dict()."""
    try:
        return value.state_dict()  # type: ignore[attr-defined]
    except Exception as error:
        raise failed_call_error(place, "state_dict", error) from error


def load_state(value: object, tree: object, place: Place) -> None:
    """Call an object's load_state_dict()."""
    try:
        result = value.load_state_dict(tree)  # type: ignore[attr-defined]
    except Exception as error:
        raise StateError(
            f"cannot restore '{place.name}'",
            **failure_facts("load_state_dict", error, next=(
                "fix this load_state_dict(), and load again before you save: the state is only partly loaded (all "
                "tensors that are loaded in place, and the objects before this one, have the checkpoint's values; the "
                "rest may still have its old values)"
            )),
        ) from error
    if result is not None:
        check_all_keys_read(getattr(result, "unexpected_keys", None), getattr(result, "missing_keys", None), place)


def check_all_keys_read(unexpected: Collection[str] | None, missing: Collection[str] | None, place: Place) -> None:
    """Raise StateError for keys that a load_state_dict() has reported as unexpected or missing."""
    if not unexpected and not missing:
        return
    faults = [f"does not read {listed_keys(unexpected)}"] if unexpected else []
    faults += [f"finds nothing for {listed_keys(missing)}"] if missing else []
    raise StateError(
        f"cannot restore '{place.name}': its load_state_dict() does not match its state_dict()",
        found=f"it {' and '.join(faults)}",
        next="read each entry in _load_from_state_dict(), or allow the difference by a rule (fs.Skip, fs.Init); its "
        "parameters and buffers are already restored",
    )


def listed_keys(keys: Collection[str]) -> str:
    """At most eight keys, for a message."""
    shown = ", ".join(f"'{key}'" for key in sorted(keys)[:8])
    return shown if len(keys) <= 8 else f"{shown} and {len(keys) - 8} more"


def _is_scheduler(value: object) -> bool:
    """Whether the value is a learning rate scheduler of torch, whose state may contain further schedulers."""
    own = class_if_imported("torch.optim.lr_scheduler", "LRScheduler")
    return own is not None and isinstance(value, own)
