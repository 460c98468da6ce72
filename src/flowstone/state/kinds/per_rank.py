"""`fs.PerRank`: a section with one value per rank. `describe` and `prepare` unwrap it; elsewhere it is refused."""

from __future__ import annotations

from typing import NoReturn

from flowstone.format.objects import unsupported
from flowstone.state import records
from flowstone.state.kind import Kind
from flowstone.state.loading import Loading
from flowstone.state.names import Place
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role


class PerRank(Kind):
    """A PerRank that is not a section of the state."""

    bases = (records.PerRank,)

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        _refuse(value, place)

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> object:
        _refuse(value, place)

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> None:
        _refuse(value, place)


def _refuse(value: object, place: Place) -> NoReturn:
    raise unsupported(place.name, value, "lies inside another value", "make it a top-level entry")
