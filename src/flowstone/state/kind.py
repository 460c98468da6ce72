"""A kind: how the library treats a type of values: how they are saved and loaded, both directions side by side.

The walk (`walk.py`) finds the kind of each value of the caller's state and calls one of its methods. A kind writes
what it finds into the object of the pass (`Scan`, `Saving`, `Loading`), and descends by calling that object's `walk`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import Place
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role


class Kind(ABC):
    """One kind of values. Stateless: there is one instance of each kind, in the table of `registry.py`.

    types      values of exactly these types are of this kind; looked up before any `recognises` is called
    bases      values of derived types are too, unless an earlier kind of the table recognises them
    nests      values contain values: the walk refuses one that contains itself, or is nested too deep
    one_value  an object that occurs at two places of a state can be restored to one value only
    replaceable  values are replaced by stored ones, unless they contain something that is written in place
    provided   a Provider describes the values: what it saves is a `Provided`
    is_object  values are restored into the object that is there, which no value can replace
    """

    types: frozenset[type] = frozenset()
    bases: tuple[type, ...] = ()
    nests = False
    one_value = False
    replaceable = False
    provided = False
    is_object = False

    def recognises(self, value: object) -> bool:
        """Whether `value`, whose type is not in `types`, is of this kind. Must be cheap: every pass calls it."""
        return isinstance(value, self.bases)

    def own_types(self) -> frozenset[type]:
        """The types for which no provider can be registered."""
        return self.types.union(self.bases)

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        """Enter into `scan` what other kinds need to know of `value`. Calls no method of it.

        returns  whether it is live: written in place, or contains a value that is
        """
        return True

    @abstractmethod
    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> object:
        """Enter the tensors of `value` into the sink. Returns the object that represents it in the checkpoint.

        role  of a tensor, in the object that contains it
        """

    @abstractmethod
    def restore(self, value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
        """Plan to restore `value` from the stored `node`, or MISSING: in place, or by a value that replaces it."""

    def takes_state(self, value: object) -> bool:
        """Whether `value` is restored only through its load_state_dict()."""
        return False
