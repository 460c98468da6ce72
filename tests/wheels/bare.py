"""An environment with nothing else: no network, no PATH, no compiler; one interpreter, and pip's packages."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DIST = Path(os.environ.get("FLOWSTONE_DIST", "nowhere"))
needs_wheels = pytest.mark.skipif(not DIST.is_dir(), reason="make test-wheels builds the wheels, and names them here")


def the_sdist() -> Path:
    (result,) = DIST.glob("*.tar.gz")
    return result.resolve()


def wheel_for(version: tuple[int, int]) -> Path:
    """The wheel that installers choose for CPython `version`."""
    tag = "cp312-abi3" if version >= (3, 12) else "cp{0}{1}-cp{0}{1}".format(*version)
    (result,) = DIST.glob(f"*-{tag}-manylinux_2_28_{os.uname().machine}.whl")
    return result.resolve()


def interpreters() -> dict[tuple[int, int], str]:
    """One of each version from 3.11 on that this machine has: on PATH, or pyenv's."""
    interpreters = {sys.version_info[:2]: sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for minor in range(11, 20):
        name = f"python3.{minor}"
        for candidate in filter(None, [shutil.which(name), *sorted(map(str, pyenv.glob(f"3.{minor}.*/bin/{name}")))]):
            if subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
                interpreters.setdefault((3, minor), candidate)
    return interpreters


@functools.cache
def _alone() -> tuple[str, ...]:
    """What goes before a command to leave it the loopback interface alone, where the system allows that."""
    loopback = str(Path(__file__).with_name("loopback.py"))
    command = (str(shutil.which("unshare")), "--map-root-user", "--net", sys.executable, loopback)
    works = subprocess.run([*command, "/bin/true"], capture_output=True, check=False).returncode == 0
    return command if works else ()


class Bare:
    """A virtual environment of `interpreter` in `place`."""

    def __init__(self, interpreter: str, place: Path) -> None:
        self.place = place
        self.home = place / "home"
        self.wheelhouse = place / "wheelhouse"
        self.home.mkdir()
        subprocess.run([interpreter, "-m", "venv", place / "env"], check=True)

    def fetch(self, *requirements: object) -> None:
        """Bring wheels here, while there is still a network."""
        pip = [self.place / "env/bin/python", "-m", "pip", "--quiet", "download", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", self.wheelhouse, *map(str, requirements)], check=True)

    def run(self, program: str, *arguments: object, status: int = 0) -> str:
        """What a program of the environment prints, with an empty PATH, no network, and no compiler to be found."""
        nothing = {"PATH": "/nowhere", "CC": "/bin/false", "CXX": "/bin/false"}
        done = subprocess.run(
            [*_alone(), self.place / "env/bin" / program, *map(str, arguments)],
            env={"HOME": str(self.home), "LANG": "C.UTF-8", **nothing}, cwd=self.home,
            capture_output=True, text=True, check=False, timeout=900,
        )
        assert done.returncode == status, f"{program} ended with {done.returncode}: {done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def install(self, *requirements: object) -> None:
        self.run(
            "python", "-m", "pip", "install", "--quiet", "--no-index", "--only-binary=:all:",
            "--find-links", self.wheelhouse, *requirements,
        )
