"""A hostile trainer: random training loops that change the state in every way in which real loops do.

    python -m hostile --seed 7          replays one of them, from the folder of the tests
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))  # `python -m`, from the folder of the tests
