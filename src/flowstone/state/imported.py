"""Classes of modules that may not be installed: before they are imported, no value can be an instance."""

from __future__ import annotations

import sys
from typing import Any


def imported(module: str, name: str) -> Any:
    """The class `name` of a module if that was imported, else None. Imports nothing, and costs almost nothing."""
    return getattr(sys.modules.get(module), name, None)
