"""Any other object with state_dict() and load_state_dict(): the returned tree is described."""

from __future__ import annotations

from torch.optim.lr_scheduler import LRScheduler

from flowstone.errors import StateError
from flowstone.state.kind import Kind
from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import Place
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import holds_provided, kind_of
from flowstone.state.records import MISSING, Phase
from flowstone.state.saving import Saving
from flowstone.state.scan import facts_of_failure, refuse_failed_call
from flowstone.state.sink import Role

_VERBS = ("state_dict", "load_state_dict")


class Stateful(Kind):
    """Saved by its state_dict(), restored by its load_state_dict(), which runs last."""

    one_value = True
    is_object = True

    def recognises(self, value: object) -> bool:
        return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in _VERBS)

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> object:
        tree = state_of(value, place)
        with saving.inside("marked"):
            return saving.walk(tree, place)

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
        if node is MISSING:
            loading.differ("missing", place.name, kind_of(value), "nothing of that name")
            return None
        new_values = NewValues(loading, phase=Phase.STATEFUL)
        has_objects = holds_provided(node) or isinstance(value, LRScheduler)
        new_values.want(node, place, state_of(value, place) if has_objects else MISSING)
        loading.later(Phase.STATEFUL, lambda: load_state(value, new_values.build(node, place.name), place))
        return None

    def takes_state(self, value: object) -> bool:
        return True


def state_of(value: object, place: Place) -> object:
    """What an object's state_dict() returns."""
    try:
        return value.state_dict()  # type: ignore[attr-defined]
    except Exception as error:
        raise refuse_failed_call(place, "state_dict", error) from error


def load_state(value: object, tree: object, place: Place) -> None:
    """Call an object's load_state_dict()."""
    try:
        result = value.load_state_dict(tree)  # type: ignore[attr-defined]
    except Exception as error:
        raise StateError(
            f"cannot restore '{place.name}'",
            **facts_of_failure("load_state_dict", error, next=(
                "fix that load_state_dict(), and load again before you save: all tensors of the state are already "
                "restored, and the objects before this one"
            )),
        ) from error
    if result is not None:
        from flowstone.state.module_loads import check_read  # imported here: few objects say anything

        check_read(getattr(result, "unexpected_keys", None), getattr(result, "missing_keys", None), place)
