"""A session on a GPU for which no wheel fits: Flowstone is built there, which takes a compiler some minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bare import needs_wheels

import flowstone

ROOT = Path(__file__).resolve().parents[2]


@needs_wheels
def test_where_no_wheel_fits_flowstone_is_built_from_this_tree(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "flowstone-99.0-cp27-none-win32.whl").write_bytes(b"of another system")
    environment = {
        **os.environ, "PYTHON": sys.executable, "WHEELS": str(wheels), "CUDA_VISIBLE_DEVICES": "",
        "SKBUILD_CMAKE_BUILD_TYPE": "Debug",  # which takes a compiler less time
    }
    command = ["sh", "tools/gpu_session.sh", "run", str(tmp_path / "out"), "--only", "facts"]
    command += ["--scratch", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert f"no wheel of Flowstone in {wheels} fits; building it" in done.stderr
    assert "torch-checkpointing is left out of the rivals" in done.stderr
    recorded = json.loads((tmp_path / "out" / "session.json").read_text())["stages"]["facts"]
    facts = {row["what"]: row["value"] for row in recorded}
    assert facts["flowstone"] == flowstone.__version__
    assert not Path(facts["flowstone is at"]).is_relative_to(ROOT), "it is not this tree's"
    assert json.loads(facts["probe"]), "its engine works"
    assert not Path(facts["flowstone is at"]).exists(), "and nothing of it is left"
