"""Stage "correctness": every test that needs CUDA, under each way that users set up the device."""

from __future__ import annotations

import os
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

from bench.gpu import bounded
from bench.gpu.options import Options, emit, note, parse

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATIONS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "cudaMallocAsync": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "one connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}
LIMIT_S = 34.0  # of one configuration: one that stands still leaves the others their time
SIMULATED = (
    "tests/test_device_memory.py", "tests/test_device_derived.py", "tests/test_device_strided.py", "-k",
    "stored_as_one_on_the_host or files_are_the_same_whoever_compares or is_that_of_the_same_on_the_host",
)
RANKS = "tests/ranks"  # processes of their own, which take seconds to begin: under the first configuration alone


def main() -> None:
    options = parse()
    for name, variables in CONFIGURATIONS.items():
        _run(name, variables, options)
        if options.simulate:
            break  # the simulated device knows none of these


def tests(options: Options, *, ranks: bool) -> tuple[str, ...]:
    """What pytest is to run: for a GPU all files whose names say CUDA. `ranks`: those of several processes, too."""
    if options.simulate:
        return SIMULATED
    found = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*cuda*.py"))]
    return tuple(path for path in found if ranks or not path.startswith(RANKS))


def _run(name: str, variables: Mapping[str, str], options: Options) -> None:
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}",
            f"--basetemp={folder}/tests", *tests(options, ranks=name == next(iter(CONFIGURATIONS))),
        ]
        done = bounded.run(command, LIMIT_S, cwd=ROOT, env={**os.environ, **variables})
        if done is None:
            emit(f"tests, {name}", f"stood still for {LIMIT_S:.0f} s")
            return
        note(f"== {name}\n{done.stdout}{done.stderr}")
        if not report.exists():
            emit(f"tests, {name}", f"pytest ended with {done.returncode}: {done.stderr.strip()[-300:]}")
            return
        cases = ElementTree.parse(report).getroot().iter("testcase")
        outcome = {f"{case.get('classname')}::{case.get('name')}": {child.tag for child in case} for case in cases}
    failed = [test for test, tags in outcome.items() if tags & {"failure", "error"}]
    skipped = [test for test, tags in outcome.items() if "skipped" in tags]
    passed = len(outcome) - len(failed) - len(skipped)
    emit(f"tests, {name}: failed", len(failed), "", passed=passed, skipped=len(skipped), names=failed)
