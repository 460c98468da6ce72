"""Steps in the names that others give their checkpoints."""

from __future__ import annotations

import re

from flowstone.config import STEP_MAX

_TRAILING_NUMBER = re.compile(r"(\d+)$", re.ASCII)


def step_at_end(name: str) -> int | None:
    """The number at the end of a name, `step_100` or `checkpoint-100`; None if none is there that can be a step."""
    found = _TRAILING_NUMBER.search(name)
    step = int(found[1]) if found else None
    return None if step is None or step > STEP_MAX else step
