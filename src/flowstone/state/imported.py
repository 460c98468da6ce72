"""Classes that a file cannot bring: of modules that may not be installed, and of the state that is loaded.

Before a module is imported, no value can be an instance of its classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

LIVE_VALUES: ContextVar[list[object] | None] = ContextVar("live_values", default=None)
"""Values of the loaded state, whose classes a load may create by name (`classes.py`)."""


def imported(module: str, name: str) -> Any:
    """The class `name` of a module if that was imported, else None. Imports nothing, and costs almost nothing."""
    return getattr(sys.modules.get(module), name, None)


def with_classes_of(state: Mapping[str, object], act: Callable[[], None]) -> None:
    """Call `act`; while it runs, an unknown name is looked up among the classes of all values in `state`."""
    token = LIVE_VALUES.set([dict(state)])
    try:
        act()
    finally:
        LIVE_VALUES.reset(token)
