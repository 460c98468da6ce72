"""Random number generators, each restored to exactly the saved state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

from flowstone.errors import StateError
from flowstone.format.objects import TensorRef, unsupported
from flowstone.state.imported import imported
from flowstone.state.kind import Kind
from flowstone.state.loading import Loading
from flowstone.state.names import Place
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import kind_of
from flowstone.state.records import MISSING, PerRank, Phase, Stored
from flowstone.state.saving import Saving
from flowstone.state.sink import Role


class ProcessGenerators:
    """The generators that belong to the process: python's, numpy's, torch's on the CPU and on every GPU."""

    __slots__ = ()


class Generator(Kind):
    """A generator, or all that belong to the process. Restored last: all other actions may draw from it."""

    bases = (torch.Generator, random.Random, ProcessGenerators)
    one_value = True
    is_object = True

    def recognises(self, value: object) -> bool:
        return super().recognises(value) or isinstance(value, _numpy_types())

    def own_types(self) -> frozenset[type]:
        return super().own_types().union(_numpy_types())

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> object:
        return saving.walk(state_of(value, place.name), place)

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> None:
        if node is MISSING:
            loading.differ("missing", place.name, kind_of(value), "nothing of that name")
            return
        current = state_of(value, place.name)
        if not fits(current, node, loading.stored):
            loading.differ("kind", place.name, label(current, value), label(node, node))
            return
        new_values = NewValues(loading)
        new_values.want(node, place)
        missing = devices_missing(node)
        if missing:
            loading.notes.append(f"{place.name}: {missing} GPU(s) are not here, so their generators were skipped")
        loading.later(Phase.GENERATORS, lambda: _load(value, new_values.build(node, place.name), place))


def _numpy_types() -> tuple[type, ...]:
    """Numpy's generator classes. Numpy imports them at first use, so that a load without generators does not."""
    found = (imported("numpy.random", name) for name in ("Generator", "RandomState", "BitGenerator"))
    return tuple(one for one in found if one is not None)


def rng() -> PerRank:
    """The generators of this process, as a per-rank section.

    python's `random`, numpy's global one, torch's on the CPU and on every GPU that is in use.
    """
    return PerRank(ProcessGenerators())


def state_of(generator: object, name: str) -> object:
    """The state of a generator as a tree of plain values, and new tensors and arrays."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
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
        "torch": torch.get_rng_state(),
        "cuda": cuda_states(),
    }


def restore(generator: object, state: object) -> None:
    """Set a generator to a state from `state_of`, of the same type of generator."""
    if isinstance(generator, torch.Generator):
        generator.set_state(cast("torch.Tensor", state))
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


def cuda_states() -> list[torch.Tensor]:
    """The state of every GPU's default generator; none where GPUs cannot be used.

    Before the process has used a GPU, that initialises CUDA: what seeded the generators by then is queued, and would
    be lost.
    """
    if not torch.cuda.is_available() or torch.cuda._is_in_bad_fork():
        return []
    return torch.cuda.get_rng_state_all()


def _restore_process(state: dict[str, object]) -> None:
    _restore_python(_python_global(), cast("dict[str, object]", state["python"]))
    np.random.set_state(cast("dict[str, object]", state["numpy"]))
    torch.set_rng_state(cast("torch.Tensor", state["torch"]))
    saved = cast("list[torch.Tensor]", state["cuda"])
    for device, one in enumerate(saved[: cuda_count()]):
        torch.cuda.set_rng_state(one, device)


def cuda_count() -> int:
    """For how many GPUs this process can restore a generator."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _python_global() -> random.Random:
    """The instance whose bound methods are the functions of `random`."""
    return cast("random.Random", random.random.__self__)  # type: ignore[attr-defined]


def _python_state(generator: random.Random, name: str) -> dict[str, object]:
    """`getstate()` is (version, 624 words and a position, next gauss); the words become an array."""
    try:
        version, words, gauss = generator.getstate()
        table = np.array(words, np.uint32)
    except (NotImplementedError, TypeError, ValueError, OverflowError) as error:
        raise unsupported(name, generator, "is a generator whose state cannot be read") from error
    return {"version": version, "words": table, "gauss_next": gauss}


def _restore_python(generator: random.Random, state: dict[str, object]) -> None:
    words = cast("np.ndarray", state["words"])
    generator.setstate((state["version"], tuple(words.tolist()), state["gauss_next"]))


_POSITIONS: Mapping[object, int] = {"pos": 624, "buffer_pos": 4}
"""Limits of a numpy generator's position in its table: of MT19937, of Philox."""


def fits(current: object, node: object, stored: Stored) -> bool:
    """Whether a stored object has the form of a generator's current state, so that `restore` accepts it."""
    if isinstance(current, (torch.Tensor, np.ndarray)):
        if not isinstance(node, TensorRef):
            return False
        found = stored.tensors.get(stored.rename(node.name))
        name = str(current.dtype).removeprefix("torch.")
        # A missing tensor is reported separately.
        return found is None or (found.dtype.name == name and found.shape == tuple(current.shape))
    if isinstance(current, dict):
        if not isinstance(node, dict) or current.keys() != node.keys():
            return False
        return all(_fits_entry(key, item, node[key], stored) for key, item in current.items())
    return type(node) in (int, float, str, type(None))


def _fits_entry(key: object, current: object, node: object, stored: Stored) -> bool:
    if key == "bit_generator" or key == "version":
        return current == node
    if key in _POSITIONS:  # numpy would read its table there, unchecked
        return type(node) is int and 0 <= node <= _POSITIONS[key]
    if key == "cuda":
        return isinstance(node, list) and all(isinstance(one, TensorRef) and one.kind == "tensor" for one in node)
    return fits(current, node, stored)


def devices_missing(node: object) -> int:
    """The number of GPUs whose generators are stored, and cannot be restored here."""
    saved = node.get("cuda") if isinstance(node, dict) else None
    return max(0, len(saved) - cuda_count()) if isinstance(saved, list) else 0


def label(state: object, generator: object) -> str:
    """A generator's type, as text for a difference."""
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
