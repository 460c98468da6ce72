"""Stage "correctness": every test that needs CUDA, with each device setting that users have."""

from __future__ import annotations

import os
import re
import sys
import tempfile
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
LIMITS_S = 70.0, 34.0
"""The limit of the first configuration, which has the tests of several processes, and of each other one.

A configuration that hangs thus leaves time for the others.
"""
TEST_LIMIT_S = 20  # of one test: then its process ends, and prints where each thread was
SIMULATED = (
    "tests/stage/test_device_memory.py", "tests/stage/test_device_derived.py", "tests/stage/test_device_strided.py",
    "-k",
    "stored_as_one_on_the_host or files_are_the_same_whoever_compares or is_that_of_the_same_on_the_host",
)
RANKS = "tests/ranks"  # separate processes, which take seconds to start: only in the first configuration


def main() -> None:
    options = parse()
    for name, variables in CONFIGURATIONS.items():
        _run(name, variables, options)
        if options.simulate:
            break  # the simulated device supports none of these


def tests(options: Options, *, ranks: bool) -> tuple[str, ...]:
    """The files for pytest: on a GPU, all whose names contain CUDA. `ranks`: also those with several processes."""
    if options.simulate:
        return SIMULATED
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*cuda*.py"))]
    return tuple(path for path in files if ranks or not path.startswith(RANKS))


def _run(name: str, variables: Mapping[str, str], options: Options) -> None:
    is_first = name == next(iter(CONFIGURATIONS))
    limit_s = LIMITS_S[0 if is_first else 1]
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        command = [
            sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", f"--basetemp={folder}/tests",
            "-o", f"faulthandler_timeout={TEST_LIMIT_S}", *tests(options, ranks=is_first),
        ]
        done = bounded.run(command, limit_s, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1", **variables})
    note(f"== {name}\n{done.out}{done.error}")
    outcome = outcomes(done.out)
    failed = [test for test, how in outcome.items() if how in ("FAILED", "ERROR", "")]
    counts = {how: sum(state == how.upper() for state in outcome.values()) for how in ("passed", "skipped")}
    has_stopped = "" in outcome.values()  # a test that hung has ended pytest, also with 1
    if done.status not in (0, 1) or has_stopped or not outcome:  # 1: some tests have failed
        how = f"stood still for {limit_s:.0f} s" if done.status is None else f"pytest ended with {done.status}"
        message = done.error.strip()[-300:] if not outcome else ""
        emit(f"tests, {name}", f"{how}: {message}" if message else how, "", **counts, names=failed)
        return
    emit(f"tests, {name}: failed", len(failed), "", **counts, names=failed)


_TEST = re.compile(r"^(tests/\S+?::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)?$")


def outcomes(message: str) -> dict[str, str]:
    """The outcome of each test, from pytest's output; "": it had begun, and had not ended."""
    outcomes: dict[str, str] = {}
    for line in message.splitlines():
        if (match := _TEST.match(line)) is not None:
            outcomes[match[1].strip()] = match[2] or outcomes.get(match[1].strip(), "")
    return outcomes
