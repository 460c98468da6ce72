"""The source distribution builds without installed headers of the libraries that are compiled in."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from wheels.bare import needs_wheels, the_sdist

pytestmark = needs_wheels
# A mount of nothing over what must not be found; and a compiler that warns of much, which is no error.
_HIDDEN = """
set -e
for header in /usr/include/liburing.h /usr/include/liburing /usr/include/xxhash.h /usr/include/zstd.h; do
    test -d "$header" && mount -t tmpfs none "$header"
    test -f "$header" && mount --bind /dev/null "$header"
done
exec "$@"
"""


def test_it_builds_with_the_systems_headers_hidden(tmp_path: Path) -> None:
    hide = [str(shutil.which("unshare")), "--map-root-user", "--mount", "sh", "-c", _HIDDEN, "sh"]
    if subprocess.run([*hide, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system lets no process hide files from itself (unshare --mount)")
    pip = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    tools = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path), "CXXFLAGS": "-Wconversion"}
    done = subprocess.run([*hide, *pip, the_sdist()], env=tools, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "wheel", "zip")
    probe = "import _native; print(_native.__file__, _native.Engine)"
    where = tmp_path / "wheel/flowstone"
    completed = subprocess.run([sys.executable, "-c", probe], cwd=where, capture_output=True, text=True, check=False)
    assert completed.stdout.startswith(str(where)), completed.stderr


def test_it_holds_what_a_distributor_needs_and_nothing_built() -> None:
    with tarfile.open(the_sdist()) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CMakeLists.txt", "Makefile", "docs/FORMAT.md", "tests/test_docs.py"} <= names
    assert {"third_party/liburing/src/setup.c", "third_party/xxhash/xxhash.h", "third_party/xxhash/LICENSE"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".whl")) or name.startswith(("build/", ".venv"))]
