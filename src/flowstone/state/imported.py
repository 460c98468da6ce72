"""Classes of modules that may not be there: before anything has imported them, no value is one of their objects."""

from __future__ import annotations

import sys
from typing import Any


def imported(module: str, name: str) -> Any:
    """The class `name` of a module, if that was imported, else None. Imports nothing, and costs next to nothing."""
    return getattr(sys.modules.get(module), name, None)
