"""What the benchmark of a replica's lag computes."""

from __future__ import annotations

import pytest

from bench.replica_lag import lags


def test_steps_count_from_the_one_at_which_the_replica_has_caught_up() -> None:
    durable = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}
    made = {1: 3.5, 2: 3.5, 3: 3.5, 4: 4.2, 5: 4.9}
    assert lags(durable, made) == pytest.approx([0.5, 0.2, 0.0])


def test_a_replica_that_has_not_caught_up_has_no_lag_to_tell() -> None:
    assert lags({1: 1.0, 2: 2.0, 3: 3.0}, {1: 9.0, 2: 9.5}) == []
