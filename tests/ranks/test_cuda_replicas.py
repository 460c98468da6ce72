"""Tests of replicas that need a GPU; `test_device_replicas.py` has the same on simulated devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_replica_acts import PLACES
from processes import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_replicas_on_a_gpu_that_differ_in_one_byte_fail_that_save_by_name(tmp_path: Path) -> None:
    for result in run(2, "cuda_replica_acts", "one_byte_differs", str(tmp_path / "run"), "digests"):
        assert isinstance(result, dict)
        assert result.keys() == PLACES.keys()
        for name, words in result.items():
            wrong, _, again = words.partition(" / ")
            assert f"'x.{name}' is not the same on rank 1 as on rank 0\n" in wrong, words
            assert again == "None", words
