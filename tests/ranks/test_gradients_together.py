"""Compressed gradients of several ranks: the exchanged bytes are logged once, and all ranks replay them."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from processes import Ranks, run

STEPS = 8
STATE_BYTES = 3 * 4 * (2 * (256 * 256 + 256) + 256 * 8 + 8)


def told(results: list[object], name: str) -> list[Any]:
    return [result[name] for result in results]  # type: ignore[index]


@pytest.mark.parametrize(("how", "share"), [("top-k+", 0.05), ("int8+", 0.2)])
def test_what_was_exchanged_is_logged_once_and_loads_bit_for_bit_on_all_ranks(
    tmp_path: Path, how: str, share: float
) -> None:
    path = str(tmp_path / "run")
    trained = run(2, "gradient_acts", "train", path, how, STEPS)
    assert told(trained, "journaled") == [list(range(2, STEPS + 1))] * 2
    assert told(trained, "uncompressed") == [[], []], "a clipping is a factor"
    assert sum(told(trained, "bytes")) < share * STATE_BYTES
    loaded = run(2, "gradient_acts", "load", path, how)
    assert told(loaded, "step") == [STEPS, STEPS]
    assert told(loaded, "bits") == told(trained, "bits")
    assert told(loaded, "exactness") == ["exact", "exact"]
    assert told(loaded, "approximate") == [["gradients"]] * 2
    if how == "top-k+":
        first, second = told(loaded, "residual")
        assert first != second, "each rank has its own"
        assert min(told(loaded, "zeros")) > STEPS * 1000
    else:
        assert told(loaded, "residual") == [0.0, 0.0]


def test_killed_ranks_lose_at_most_the_step_in_progress_and_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    ranks = Ranks(2, "gradient_acts", "train", path, "top-k", 1000)
    begun, deadline = Path(f"{path}.begun.0"), time.monotonic() + 60
    while (not begun.exists() or int(begun.read_text() or 0) < 4) and time.monotonic() < deadline:
        time.sleep(0.002)
    for rank in range(2):
        ranks.kill(rank, signal.SIGKILL)
    ranks.end()
    reached = int(begun.read_text() or 0)
    end = reached + 3
    trained = run(2, "gradient_acts", "train", path, "top-k", end)
    assert min(told(trained, "done")) >= reached - 1 >= 3
    assert told(trained, "bits") == [item[-1] for item in run(2, "gradient_acts", "undisturbed", "top-k", end)]
