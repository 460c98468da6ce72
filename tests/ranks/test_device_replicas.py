"""Replicas on devices: each save compares all bytes of replicas that the devices digest, without copying them."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_replica_acts import PLACES
from processes import run


def test_replicas_on_devices_that_differ_in_one_byte_fail_that_save_by_name(tmp_path: Path) -> None:
    for result in run(2, "device_replica_acts", "one_byte_differs", str(tmp_path / "run"), "digests"):
        assert isinstance(result, dict)
        assert result.keys() == PLACES.keys()
        for name, words in result.items():
            wrong, _, again = words.partition(" / ")
            assert f"'x.{name}' is not the same on rank 1 as on rank 0\n" in wrong, words
            assert again == "None", words


def test_samples_miss_that_byte_but_in_what_is_no_longer_than_a_line(tmp_path: Path) -> None:
    for result in run(2, "device_replica_acts", "one_byte_differs", str(tmp_path / "run"), "auto"):
        assert isinstance(result, dict)
        assert result["large"] == result["long"] == "None / None"
        assert "'x.tiny' is not the same on rank 1 as on rank 0\n" in result["tiny"]


def test_a_save_waits_for_no_digest_and_copies_no_replica_that_another_rank_writes(tmp_path: Path) -> None:
    results = run(2, "device_replica_acts", "save_waits_for_nothing", str(tmp_path / "run"))
    assert results == [[True, True, True]] * 2


@pytest.mark.parametrize("how", ["host", "partly", "refused", "sampled"])
def test_ranks_that_cannot_digest_alike_raise_no_alarm_and_are_compared_by_samples(tmp_path: Path, how: str) -> None:
    for result in run(2, "device_replica_acts", "ranks_are_not_alike", str(tmp_path / "run"), how):
        assert isinstance(result, list)
        assert result[:2] == ["None", "None"]
        assert "'x.large' is not the same on rank 1 as on rank 0\n" in result[2]
