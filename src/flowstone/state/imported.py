"""Finds classes in imported modules, and in the state that is passed to `load`. A checkpoint has only their names.

As long as a module is not imported, no value can be an instance of its classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

LIVE_VALUES: ContextVar[list[object] | None] = ContextVar("live_values", default=None)
"""Values of the state that is passed to `load`. The load may create objects of their classes (`classes.py`)."""


def class_if_imported(module: str, name: str) -> Any:
    """The class `name` of a module; None if the module is not imported. Imports nothing, and costs almost nothing."""
    return getattr(sys.modules.get(module), name, None)


def call_with_classes_of(state: Mapping[str, object], act: Callable[[], None]) -> None:
    """Call `act`. While it runs, names of classes that Flowstone does not know are searched among the classes of all
    values in `state`.
    """
    token = LIVE_VALUES.set([dict(state)])
    try:
        act()
    finally:
        LIVE_VALUES.reset(token)
