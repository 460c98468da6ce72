"""Run all stages of a session, each in a process of its own with a limit of its own.

    PYTHONPATH=src:. python -m bench.gpu --out DIRECTORY [--scratch DIRECTORY] [--simulate] [--only STAGE ...]

DIRECTORY/session.json has every result, written after each stage; DIRECTORY/STAGE.log what a stage has said besides;
DIRECTORY/table.txt the table. The exit status is 1 where a test, a fault or a comparison of bits has failed, on the
simulated device too; numbers that are lower than asked change it for a GPU alone.
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
from typing import TextIO

from bench.gpu.faults import judged
from bench.gpu.options import Options, Row
from bench.gpu.stage import STAGES
from bench.gpu.table import CHECKS, lines, text

LIMITS_S: Mapping[str, float] = {
    "facts": 20, "ceilings": 60, "correctness": 140, "faults": 80, "performance": 105, "kinds": 40, "transformer": 55,
    "rivals": 40,
}
"""In the order in which they run: together under nine minutes, and what is needed first comes first."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path(), help="on the disk that is measured; default: here")
    parser.add_argument("--simulate", action="store_true", help="play the device: shows that the session works")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    stages: dict[str, list[Row]] = {}
    took: dict[str, str] = {}
    for stage in options.only:
        with (
            tempfile.TemporaryDirectory(prefix="gpu-", dir=options.scratch, ignore_cleanup_errors=True) as at,
            (options.out / f"{stage}.log").open("w") as log,
        ):
            begin, scratch = time.monotonic(), Path(at).absolute()
            stages[stage], ended = run(stage, Options(options.simulate, scratch), log)
            took[stage] = f"{time.monotonic() - begin:.0f} s{ended}"
        found = {"stages": stages, "took": took, "simulated": options.simulate}
        (options.out / "session.json").write_text(json.dumps(found, indent=1))
    shown = text(stages, took)
    (options.out / "table.txt").write_text(shown)
    print(shown)
    checked = lines(stages)[:CHECKS] if options.simulate else lines(stages)
    ended_well = not any(why.endswith("!") for why in took.values())
    return 0 if ended_well and all(line.passed for line in checked if line.measured is not None) else 1


def run(stage: str, options: Options, log: TextIO) -> tuple[list[Row], str]:
    """What a stage has found until its end or its limit, and how it ended; "!" at the end: not well."""
    if stage == "faults":
        return list(judged(options, log, LIMITS_S[stage])), ""
    command = [sys.executable, "-m", "bench.gpu.stage", stage, "--scratch", str(options.scratch)]
    if options.simulate:
        command.append("--simulate")
    results = options.scratch / "results"
    with results.open("w") as target:
        process = subprocess.Popen(command, stdout=target, stderr=log, start_new_session=True)
        try:
            status = process.wait(LIMITS_S[stage])
            ended = "" if status == 0 else f", ended with {status}: see {stage}.log!"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f", stopped after {LIMITS_S[stage]:.0f} s!"
    said = results.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in said if line.startswith('{"what"') and line.endswith("\n")], ended


if __name__ == "__main__":
    sys.exit(main())
