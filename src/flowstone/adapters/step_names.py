"""Step numbers in the names of other programs' checkpoints."""

from __future__ import annotations

import re

from flowstone.config import STEP_MAX

_TRAILING_NUMBER = re.compile(r"(\d+)$", re.ASCII)


def step_at_end(name: str) -> int | None:
    """The number at the end of a name such as `step_100` or `checkpoint-100`. None if there is no number that is a
    valid step.
    """
    match = _TRAILING_NUMBER.search(name)
    step = int(match[1]) if match else None
    return None if step is None or step > STEP_MAX else step
