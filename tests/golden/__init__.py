"""Checkpoints of every format version, and the programs that wrote them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))  # `python -m`, from the folder of the tests
