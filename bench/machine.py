"""A description of the machine, without its names or paths."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.environments import pinned
from flowstone import __version__
from flowstone_study import machine


def describe(directory: Path, environments: Iterable[str]) -> dict[str, str]:
    """The fields of the machine line, in its order; `environments` are those of the rivals."""
    return {
        **machine.describe(directory),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "safetensors": _version("safetensors"),
        "fio": _fio(),
        "flowstone": __version__,
    } | dict(pinned(name).split(" ", 1) for name in dict.fromkeys(environments))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _fio() -> str:
    try:
        return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()[4:]
    except (OSError, subprocess.CalledProcessError):
        return "absent"
