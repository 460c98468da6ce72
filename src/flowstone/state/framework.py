"""The framework whose tensors a state may have in addition to numpy arrays: torch, if it is installed.

The code of this folder calls no framework directly: it examines tensors through the protocol `Framework`. The code for
a framework is in an optional folder of the package, named in `_FRAMEWORKS`. That folder has two modules: `framework`
with the functions of the protocol, and `kinds` with the code that saves and loads its values (ValueKinds, `kind.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, cast

from flowstone.extensions import find_extension

if TYPE_CHECKING:  # also the protocol, as creating so large a class would delay each start of Python
    import numpy as np
    from numpy.typing import NDArray

    from flowstone.format.objects import NamedConstant
    from flowstone.state.memory import Columns, IndirectTarget
    from flowstone.table.dtype import DType
    from flowstone.table.pieces import Alias, Memory

    class Framework(Protocol):
        """The functions of a framework with which states are described and restored. Parameters of type Any are its
        tensors.

        DENSE_TYPES      types of tensors that are plain memory
        NO_TENSOR        stands for memory that no tensor owns
        GENERATOR_TYPES  types of random number generators
        """

        @property
        def DENSE_TYPES(self) -> frozenset[type]: ...  # noqa: N802

        @property
        def NO_TENSOR(self) -> Any: ...  # noqa: N802

        @property
        def GENERATOR_TYPES(self) -> tuple[type, ...]: ...  # noqa: N802

        def is_tensor(self, value: object, /) -> bool:
            """Whether `value` is a tensor, of any type."""

        def columns(self, tensors: Sequence[Any], names: Sequence[str], /, *, hold: bool) -> Columns:
            """Find the memory of each tensor. `hold`: keep the tensors' storages alive, and read version counters.

            raises  UnsupportedStateError, by name, for a tensor that cannot be stored
            """

        def memory_of(self, tensor: Any, /) -> Memory:
            """The memory of a dense tensor."""

        def resolved(self, tensor: Any, /) -> Any:
            """The tensor itself; but for a tensor with a conjugate or negative bit, whose memory does not contain the
            tensor's values, a copy whose memory contains them.
            """

        def detour(self, tensor: Any, dtype: DType, /) -> tuple[Memory, IndirectTarget, Callable[[], None]] | None:
            """For a tensor with a conjugate or negative bit, whose memory does not contain the tensor's values, returns
            three things: separate memory into which the values are loaded, the tensor's own memory, and a function that
            then copies the loaded values into the tensor. Returns None for all other tensors.
            """

        def versions_of(self, tensors: Sequence[Any], /) -> NDArray[np.int64]:
            """The version counter of each tensor, which grows with each change in place."""

        def count_as_written(self, tensors: Sequence[Any], /) -> None:
            """Increment the tensors' version counters, as a load writes their bytes without the framework."""

        def extent_of(self, owner: object, /) -> tuple[int, int] | None:
            """Address and length in bytes of a storage of tensors; None for any other owner of memory."""

        def empty(self, dtype: DType, shape: Sequence[int], /, *, device: Any = "cpu") -> Any:
            """A new tensor with undefined elements."""

        def tensor_over(self, raw: np.ndarray, dtype: DType, shape: Sequence[int], /) -> Any:
            """A tensor over the bytes of `raw`, an array of uint8."""

        def converted(self, tensor: Any, dtype: DType, /) -> Any:
            """The tensor, or a copy with row-major elements of `dtype`."""

        def constant_name(self, value: object, /) -> NamedConstant | None:
            """The stored name of a constant of the framework; None for any other value."""

        def constant(self, constant: NamedConstant, path: str, /) -> object:
            """The constant of that name. Raises LookupError for an unknown one, DamagedError for an invalid name."""

        def generator_state(self, generator: Any, /) -> Any:
            """The state of a generator, as a new tensor."""

        def set_generator_state(self, generator: Any, state: object, /) -> None:
            """Set a generator to a state from `generator_state`."""

        def process_generators(self) -> Mapping[str, object]:
            """The states of the generators that belong to the process, by name."""

        def set_process_generators(self, state: Mapping[str, object], /) -> None:
            """Set these generators to states from `process_generators`. Other names in `state` are ignored."""

        def generators_missing(self, node: object, /) -> int:
            """The number of devices whose generators are stored, and cannot be restored here."""

        def untie(self, state: Mapping[str, object], loading: Any, aliases: Sequence[Alias], /) -> Sequence[int]:
            """Request separate memory for each tied tensor in `aliases` that can be replaced in the state. Returns the
            positions of these tensors in the sink (the list of collected tensors, `sink.py`).
            """

_FRAMEWORKS = ("torch",)


def _installed() -> str | None:
    return next((name for name in _FRAMEWORKS if name in sys.modules or find_spec(name) is not None), None)


INSTALLED = _installed()
"""The name of the framework, and of its folder in this package; None: no framework is installed."""
FRAMEWORK = cast("Framework", (
    (INSTALLED and find_extension(f"{INSTALLED}.framework")) or import_module("flowstone.state.numpy_only")
))


def kinds_module() -> Any:
    """The module whose ValueKinds (`kind.py`) save and load the framework's values: TENSOR_KINDS, which are tried
    before the kind of numpy arrays, and OBJECT_KINDS. If this installation lacks the folder for the framework (such as
    `torch/`), returns a module whose kinds refuse the framework's values with an error. None if no framework is
    installed.
    """
    if INSTALLED is None:
        return None
    return find_extension(f"{INSTALLED}.kinds") or import_module("flowstone.state.kinds.refused")
