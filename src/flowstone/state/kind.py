"""A kind: how values of a type are saved and loaded, both directions side by side.

The walk (`walk.py`) finds the kind of each value of the caller's state and calls one of the kind's methods. The kind
writes what it finds into the object of the current pass (`StateScan`, `DescribePass`, `RestorePass`). For values inside
of the value, the kind calls the `walk` of the pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from flowstone.state.loading import Replacement, RestorePass
from flowstone.state.names import Place
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole


class ValueKind(ABC):
    """One kind of values, such as modules. There is one object of each kind, in the table of `registry.py`; it has no
    state.

    types      values of exactly these types are of this kind; they are found before any `recognises` is called
    bases      values of types derived from these are of this kind, too, unless an earlier kind recognises them
    nests      whether values may contain values; the walk refuses a value that contains itself, or is nested too deep
    one_value  whether an object at two places of a state must have the same stored value at both
    replaceable  whether a load replaces values by stored ones, unless something in them is written in place
    provided   whether a Provider describes the values; they are stored as a `ProviderRecord`
    is_object  whether a value is restored into the existing object, which no new object can replace
    """

    types: frozenset[type] = frozenset()
    bases: tuple[type, ...] = ()
    nests = False
    one_value = False
    replaceable = False
    provided = False
    is_object = False

    def recognises(self, value: object) -> bool:
        """Whether `value`, whose type is not in `types`, is of this kind. Must be fast, as every pass calls it."""
        return isinstance(value, self.bases)

    def own_types(self) -> frozenset[type]:
        """The types of this kind, for which users cannot register a provider."""
        return self.types.union(self.bases)

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        """Record in `scan` what other kinds need to know about `value`. Calls no method of `value`.

        returns  whether a load writes `value`, or a value inside of it, in place
        """
        return True

    @abstractmethod
    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> object:
        """Add the tensors of `value` to the sink (the list of tensors to save, `sink.py`). Returns the object that is
        stored for `value` in the checkpoint.

        role  if `value` is a tensor: what it is in the object that contains it, such as a parameter
        """

    @abstractmethod
    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> Replacement | None:
        """Plan to restore `value` from its stored form `node` (MISSING: it is not stored). Returns None if it is
        restored in place, or a Replacement that makes a new value.
        """

    def takes_state(self, value: object) -> bool:
        """Whether `value` is restored only through its load_state_dict()."""
        return False
