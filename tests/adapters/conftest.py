"""Fixtures of the tests of adapters."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "ranks"))  # processes.py, which makes ranks
