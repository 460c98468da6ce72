"""The exception in whose handling a training runs, as in a caller's except block; apart from one that ends it."""

from __future__ import annotations

import sys


class OuterException:
    """The exception that is being handled where this is made, or none.

    Only its identity is kept: the exception holds the frames of what has failed, and these the state.
    """

    def __init__(self) -> None:
        self._identity = id(sys.exception())

    def training_has_failed(self) -> bool:
        """Whether another exception is being handled now. An error that is raised then would hide it."""
        return sys.exception() is not None and id(sys.exception()) != self._identity
