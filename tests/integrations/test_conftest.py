"""Tests that FLOWSTONE_INTEGRATIONS requests run or fail: a run that skips everything must not pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def collect(asked: str) -> subprocess.CompletedProcess[str]:
    options = ["--collect-only", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / "test_digests.py")]
    return subprocess.run(
        command, cwd=HERE.parent.parent, env=os.environ | {"FLOWSTONE_INTEGRATIONS": asked}, capture_output=True,
        text=True, check=False, timeout=600,
    )


def test_a_value_that_is_not_known_is_refused() -> None:
    done = collect("al")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert "FLOWSTONE_INTEGRATIONS=al is not known" in done.stderr


def test_without_a_value_packages_may_be_missing() -> None:
    done = collect("")
    assert done.returncode == pytest.ExitCode.OK, done.stderr
