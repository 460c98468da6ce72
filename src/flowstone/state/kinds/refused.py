"""Refuses tensors and other values of torch, if torch is installed but the folder `torch/` of this package was deleted.
"""

from __future__ import annotations

from typing import NoReturn

from flowstone.errors import FrameworkError
from flowstone.extensions import missing_option
from flowstone.state.framework import INSTALLED
from flowstone.state.kind import ValueKind
from flowstone.state.loading import RestorePass
from flowstone.state.names import Place, type_name
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole


class RefusedKind(ValueKind):
    """A value of a class of the framework, or of a class derived from such a class. It is refused by the first pass
    over the state.
    """

    def recognises(self, value: object) -> bool:
        return any(base.__module__.partition(".")[0] == INSTALLED for base in type(value).__mro__)

    def find(self, value: object, place: Place, scan: StateScan) -> NoReturn:
        raise _error(value, place)

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> NoReturn:
        raise _error(value, place)

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> NoReturn:
        raise _error(value, place)


def _error(value: object, place: Place) -> FrameworkError:
    assert INSTALLED is not None, "the framework is installed"
    return missing_option(INSTALLED, found=f"{type_name(type(value))} at '{place.name}'")


TENSOR_KINDS = (RefusedKind(),)
OBJECT_KINDS = ()
