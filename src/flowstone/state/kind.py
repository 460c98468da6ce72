"""A kind: what a value of a state is to the library, and how it is saved and loaded, both directions side by side.

The walk (`walk.py`) finds the kind of each value of the caller's state and calls one of its verbs. A kind writes what
it knows into what it is handed (`Scan`, `Saving`, `Loading`), and goes on below by their `walk`, a plain callable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import Place
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role


class Kind(ABC):
    """One kind of values. Holds no state of any: there is one instance of each kind, in the table of `registry.py`.

    types      exactly these types are of this kind: looked up before any kind is asked what it recognises
    bases      so is what is derived from these, unless an earlier kind of the table recognises it
    nests      values hold values: the walk refuses one that contains itself, or lies too deep
    one_value  an object that stands in two places of a state can be restored to one value only
    replaceable  values are replaced by what is stored, unless they hold what is written in place
    provided   a Provider has the word: what it saves is a `Provided`
    """

    types: frozenset[type] = frozenset()
    bases: tuple[type, ...] = ()
    nests = False
    one_value = False
    replaceable = False
    provided = False

    def recognises(self, value: object) -> bool:
        """Whether `value`, whose type is none of `types`, is of this kind. Cheap: it is asked in every pass."""
        return isinstance(value, self.bases)

    def own_types(self) -> frozenset[type]:
        """The types that no provider may take over."""
        return self.types.union(self.bases)

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        """Enter what others have to know of `value` before anything is described; calls into none of it.

        returns  whether it is live: written in place, or holds what is
        """
        return True

    @abstractmethod
    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> object:
        """Enter the tensors of `value` into the sink; the object that stands for it in the checkpoint.

        role  what a tensor is to whatever holds it
        """

    @abstractmethod
    def restore(self, value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
        """Plan to restore `value` from the stored `node`, or MISSING: in place, or by what is to take its place."""

    def takes_state(self, value: object) -> bool:
        """Whether all there is of `value` goes through its load_state_dict()."""
        return False
