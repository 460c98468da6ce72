"""Environments for rivals whose packages are not dependencies of the project, created on first use and kept.

Each is based on the interpreter that runs the benchmark and finds its packages after its own, so torch is the same for
all and is not installed again. bench/pins/NAME.txt pins the additional packages, which are installed without
dependencies, so that none can install another torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

PINS = Path(__file__).resolve().parent / "pins"
MARK = "made"  # written last; contains what the environment was made from
TIMEOUT_S = 900.0


class CannotInstallError(Exception):
    """An environment could not be created; the installer's message."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The folder of this benchmark's environments."""

    root: Path

    def python(self, name: str) -> Path:
        """The interpreter of environment `name`; creates it if it is missing or its pins have changed."""
        directory = self.root / name
        if not is_made(directory, name):
            shutil.rmtree(directory, ignore_errors=True)
            make(directory, PINS / f"{name}.txt")
            (directory / MARK).write_text(origin(name))
        return (directory / "bin" / "python").absolute()


def is_made(directory: Path, name: str) -> bool:
    mark = directory / MARK
    return mark.exists() and mark.read_text() == origin(name)


def origin(name: str) -> str:
    """The inputs of an environment: pins and the base interpreter."""
    below = f"{Path(sys.prefix).resolve()} {sys.version}".encode()
    return hashlib.sha256((PINS / f"{name}.txt").read_bytes() + below).hexdigest()


def pinned(name: str) -> str:
    """The package that an environment is for, with its version: the first pinned one."""
    lines = (line.strip() for line in (PINS / f"{name}.txt").read_text().splitlines())
    return next(line for line in lines if line and not line.startswith("#")).replace("==", " ")


def make(directory: Path, pins: Path) -> None:
    _call([sys.executable, "-m", "venv", "--without-pip", str(directory)])
    python = directory / "bin" / "python"
    own = Path(_call([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    below = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    lines = (f"import site; site.addsitedir({path!r})\n" for path in below)  # the .pth files there count as well
    (own / "below.pth").write_text("".join(lines))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    _call([*pip, "install", "--quiet", "--no-deps", "--requirement", str(pins)])


def _call(command: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CannotInstallError(f"no end after {TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise CannotInstallError(" ".join(lines[-2:]) or f"ended with {done.returncode}")
    return done.stdout
