"""Random number generators, each restored to exactly the saved state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from flowstone.errors import StateError
from flowstone.format.objects import TensorRef, unsupported_error
from flowstone.state.framework import FRAMEWORK
from flowstone.state.imported import class_if_imported
from flowstone.state.kind import ValueKind
from flowstone.state.loading import RestorePass
from flowstone.state.names import Place
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import describe_node
from flowstone.state.records import MISSING, PerRank, RestorePhase, StoredState
from flowstone.state.saving import DescribePass
from flowstone.state.sink import TensorRole


class ProcessGenerators:
    """Stands in a state for all generators that belong to the process: python's, numpy's, and torch's."""

    __slots__ = ()


class GeneratorKind(ValueKind):
    """A generator, or all generators of the process. Generators are restored last, since restoring other objects may
    draw random numbers.
    """

    bases = (*FRAMEWORK.GENERATOR_TYPES, random.Random, ProcessGenerators)
    one_value = True
    is_object = True

    def recognises(self, value: object) -> bool:
        return super().recognises(value) or isinstance(value, _numpy_types())

    def own_types(self) -> frozenset[type]:
        return super().own_types().union(_numpy_types())

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> object:
        return saving.walk(state_of(value, place.name), place)

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> None:
        if node is MISSING:
            loading.add_difference("missing", place.name, describe_node(value), "nothing of that name")
            return
        current = state_of(value, place.name)
        if not fits(current, node, loading.stored):
            loading.add_difference("kind", place.name, label(current, value), label(node, node))
            return
        new_values = NewValues(loading)
        new_values.request(node, place)
        missing = FRAMEWORK.generators_missing(node)
        if missing:
            loading.notes.append(
                f"{place.name}: this process has {missing} GPU(s) fewer than the process that saved; "
                "the generators of the missing GPUs were skipped"
            )
        loading.defer(RestorePhase.GENERATORS, lambda: _load(value, new_values.build(node, place.name), place))


def _numpy_types() -> tuple[type, ...]:
    """Numpy's generator classes. Numpy imports them at first use, so that a load without generators does not."""
    classes = (class_if_imported("numpy.random", name) for name in ("Generator", "RandomState", "BitGenerator"))
    return tuple(own for own in classes if own is not None)


def rng() -> PerRank:
    """The generators of this process, as a per-rank section.

    These are python's `random`, numpy's global generator, and torch's on the CPU and on every GPU in use.
    """
    return PerRank(ProcessGenerators())


def state_of(generator: object, name: str) -> object:
    """The state of a generator as a tree of plain values, and new tensors and arrays."""
    if isinstance(generator, FRAMEWORK.GENERATOR_TYPES):
        return FRAMEWORK.generator_state(generator)
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    if isinstance(generator, random.Random):
        return _python_state(generator, name)
    return {
        "python": _python_state(_python_global(), name),
        "numpy": np.random.get_state(legacy=False),
        **FRAMEWORK.process_generators(),
    }


def restore(generator: object, state: object) -> None:
    """Set a generator to a state from `state_of`, of the same type of generator."""
    if isinstance(generator, FRAMEWORK.GENERATOR_TYPES):
        FRAMEWORK.set_generator_state(generator, state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = cast("dict[str, object]", state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(cast("dict[str, object]", state))
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = cast("dict[str, object]", state)
    elif isinstance(generator, random.Random):
        _restore_python(generator, cast("dict[str, object]", state))
    else:
        _restore_process(cast("dict[str, object]", state))


def _restore_process(state: dict[str, object]) -> None:
    _restore_python(_python_global(), cast("dict[str, object]", state["python"]))
    np.random.set_state(cast("dict[str, object]", state["numpy"]))
    FRAMEWORK.set_process_generators(state)


def _python_global() -> random.Random:
    """The instance whose bound methods are the functions of `random`."""
    return cast("random.Random", random.random.__self__)  # type: ignore[attr-defined]


def _python_state(generator: random.Random, name: str) -> dict[str, object]:
    """The state of a `random.Random` as a dict. Like the tuple that `getstate()` returns, it has a version, 625 numbers
    (624 words and a position), and the next Gaussian number. `name` is for the error message.
    """
    try:
        version, words, gauss = generator.getstate()
        table = np.array(words, np.uint32)
    except (NotImplementedError, TypeError, ValueError, OverflowError) as error:
        raise unsupported_error(name, generator, "is a generator whose state cannot be read") from error
    return {"version": version, "words": table, "gauss_next": gauss}


def _restore_python(generator: random.Random, state: dict[str, object]) -> None:
    words = cast("np.ndarray", state["words"])
    generator.setstate((state["version"], tuple(words.tolist()), state["gauss_next"]))


_POSITIONS: Mapping[object, int] = {"pos": 624, "buffer_pos": 4}
"""Limits of a numpy generator's position in its table, for MT19937 and Philox."""


def fits(current: object, node: object, stored: StoredState) -> bool:
    """Whether a stored object has the form of a generator's current state, so that `restore` accepts it."""
    if isinstance(current, np.ndarray) or FRAMEWORK.is_tensor(current):
        if not isinstance(node, TensorRef):
            return False
        array: Any = current
        tensor = stored.tensors.get(stored.rename(node.name))
        name = str(array.dtype).removeprefix("torch.")
        # If the tensor is missing, that is reported with all other missing tensors.
        return tensor is None or (tensor.dtype.name == name and tensor.shape == tuple(array.shape))
    if isinstance(current, dict):
        if not isinstance(node, dict) or current.keys() != node.keys():
            return False
        return all(_fits_entry(key, item, node[key], stored) for key, item in current.items())
    return type(node) in (int, float, str, type(None))


def _fits_entry(key: object, current: object, node: object, stored: StoredState) -> bool:
    if key == "bit_generator" or key == "version":
        return current == node
    if key in _POSITIONS:  # numpy does not check the position, and would read outside of its table
        return type(node) is int and 0 <= node <= _POSITIONS[key]
    if key == "cuda":
        return isinstance(node, list) and all(isinstance(item, TensorRef) and item.kind == "tensor" for item in node)
    return fits(current, node, stored)


def label(state: object, generator: object) -> str:
    """The type of a generator, as text for a message about a difference."""
    own = state.get("bit_generator") if isinstance(state, dict) else None
    return f"the state of {own}" if isinstance(own, str) else f"the state of {type(generator).__name__}"


def _load(generator: object, state: object, place: Place) -> None:
    try:
        restore(generator, state)
    except Exception as error:
        raise StateError(
            f"cannot restore '{place.name}'",
            found=f"the generator refused the stored state: {type(error).__name__}: {error}",
            next="run `flowstone verify`; everything but generators is already restored",
        ) from error
