"""Run all stages of a session, each in a process of its own with a limit of its own.

    PYTHONPATH=src:. python -m bench.gpu --out DIRECTORY [--scratch DIRECTORY] [--simulate] [--only STAGE ...]

DIRECTORY/session.json has every result and DIRECTORY/table.txt the table, both written after each stage.
DIRECTORY/log.txt has other output of the stages. DIRECTORY/running.jsonl has the results of the running stage, also if
the session is killed. The exit status is 1 if a test, a fault or a comparison of bits has failed, also on the simulated
device. Figures that miss their goal make it 1 only on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from bench.gpu.faults import judged
from bench.gpu.options import Options, Row, state_bytes_max
from bench.gpu.stage import STAGES
from bench.gpu.table import CHECKS, Results, lines, text

SESSION_S = 530.0
"""All stages together: under nine minutes."""
LIMITS_S: Mapping[str, float] = {
    "facts": 60, "ceilings": 75, "correctness": 175, "faults": 85, "performance": 150, "kinds": 60, "transformer": 75,
    "rivals": 60,
}
"""In their order, most important first.

The sum of their limits is longer than a session, since most stages take much less. A stage that does not leaves less
time to later ones.
"""
STAGE_S_MIN, STOP_S = 5.0, 3.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path(), help="on the disk that is measured; default: here")
    parser.add_argument("--simulate", action="store_true", help="play the device: shows that the session works")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, _end)  # by a time limit: the running stage must end, too
    try:
        stages, took = _run_all(options.out, options.scratch, options.only, simulate=options.simulate)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(text(stages, took))
    checked = lines(stages)[:CHECKS] if options.simulate else lines(stages)
    ended_well = not any(why.endswith("!") for why in took.values())
    return 0 if ended_well and all(line.passed for line in checked if line.measured is not None) else 1


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _run_all(
    out: Path, scratch: Path, names: Sequence[str], *, simulate: bool
) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """The results of each stage, and how long it took. Written into `out` after each of them."""
    stages: dict[str, list[Row]] = {}
    took: dict[str, str] = {}
    end = time.monotonic() + SESSION_S
    with (out / "log.txt").open("w") as log:
        for stage in names:
            print(f"==== {stage}", file=log, flush=True)
            begin = time.monotonic()
            left_s = end - begin
            if left_s < STAGE_S_MIN:
                stages[stage], took[stage] = [], "not run: the stages before took all the time!"
            else:
                with tempfile.TemporaryDirectory(prefix="gpu-", dir=scratch, ignore_cleanup_errors=True) as folder:
                    size = state_bytes_max(scratch, Results(stages).number("ceilings", "disk write"))
                    own = Options(simulate, Path(folder).absolute(), size)
                    stages[stage], ended = run(stage, own, log, out / "running.jsonl", min(LIMITS_S[stage], left_s))
                took[stage] = f"{time.monotonic() - begin:.0f} s{ended}"
            session = {"stages": stages, "took": took, "simulated": simulate}
            (out / "session.json").write_text(json.dumps(session, indent=1))
            (out / "table.txt").write_text(text(stages, took))
            (out / "running.jsonl").unlink(missing_ok=True)
    return stages, took


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a stage, and give it a moment to end its children in other sessions."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(stage: str, options: Options, log: TextIO, results: Path, limit_s: float) -> tuple[list[Row], str]:
    """The results of a stage until its end or its limit, and how it ended; a final "!" marks a failure.

    results  a file for its results so far
    """
    if stage == "faults":
        rows = []
        with results.open("w") as target:
            for row in judged(options, log, limit_s):
                rows.append(row)
                print(json.dumps(row), file=target, flush=True)
        return rows, ""
    command = [sys.executable, "-m", "bench.gpu.stage", stage, *options.words()]
    with results.open("w") as target:
        process = subprocess.Popen(command, stdout=target, stderr=log, start_new_session=True)
        try:
            status = process.wait(limit_s)
            ended = "" if status == 0 else f", ended with {status}: see log.txt!"
        except subprocess.TimeoutExpired:
            ended = f", stopped after {limit_s:.0f} s!"
        finally:
            _stop(process)
    lines = results.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith('{"what"') and line.endswith("\n")], ended


if __name__ == "__main__":
    sys.exit(main())
