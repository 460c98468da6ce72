"""The benchmark is no part of the package: its folder's parent must be found."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
