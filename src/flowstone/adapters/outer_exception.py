"""Distinguishes an exception that ends a training from one in whose `except` block the training runs."""

from __future__ import annotations

import sys


class OuterException:
    """Remembers which exception was being handled when this object was created, if any.

    Only the exception's id is stored, as a reference would keep the exception's frames, and so the state, alive.
    """

    def __init__(self) -> None:
        self._identity = id(sys.exception())

    def training_has_failed(self) -> bool:
        """Whether another exception is being handled now, so that the training has failed. An error that is raised now
        would hide that exception.
        """
        return sys.exception() is not None and id(sys.exception()) != self._identity
