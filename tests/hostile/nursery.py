"""Plays many loops: forks processes that play some seeds each, and tells how each loop went, a line of JSON for one.

A process that dies or hangs has its seed's line written here, with what it had to say; the seeds behind it go on in
the next one. Started as a program, once for each processor: it has imported torch, and has no threads.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

BATCH = 25  # seeds that one process plays: few enough to be forked anew after
HANGS_S = 90.0
Line = dict[str, Any]


def tend(seeds: Sequence[int], play_one: Callable[[int], Line], tell: Callable[[Line], None], hangs_s: float) -> None:
    """Have all `seeds` played, in processes of `BATCH`. Each line is told as soon as it is known."""
    left = list(seeds)
    while left:
        batch, left = left[:BATCH], left[BATCH:]
        while batch:
            done = _batch(batch, play_one, tell, hangs_s)
            batch = batch[done:]


def _batch(seeds: Sequence[int], play_one: Callable[[int], Line], tell: Callable[[Line], None], hangs_s: float) -> int:
    """How many of them have their line: all, or up to the one that ended the process."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _play(seeds, play_one, writer, said)
        os.close(writer)
        done = 0
        with open(reader) as lines:
            while done < len(seeds):
                ready, _, _ = select.select([lines], [], [], hangs_s)
                line = lines.readline() if ready else None
                if not line:
                    tell(_ended(seeds[done], child, said, hung=not ready))
                    return done + 1
                tell(json.loads(line))
                done += 1
        _, _status = os.waitpid(child, 0)
    return done


def _play(seeds: Sequence[int], play_one: Callable[[int], Line], writer: int, said: IO[str]) -> None:
    """In the child: play, tell, and do not return."""
    os.dup2(said.fileno(), 2)
    faulthandler.enable(said)
    faulthandler.register(signal.SIGUSR1, said)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        for seed in seeds:
            os.write(writer, json.dumps(play_one(seed)).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def _ended(seed: int, child: int, said: IO[str], *, hung: bool) -> Line:
    if hung:
        os.kill(child, signal.SIGUSR1)  # says where every thread is
        time.sleep(0.5)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    how = "it hung" if hung else f"it died of {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"
    said.seek(0)
    return {"seed": seed, "problems": [f"{how}\n{said.read()[-6000:]}"], "moves": [], "counts": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", required=True, help="first:end:step")
    parser.add_argument("--moves", default="")
    parser.add_argument("--mutation", default="", help="a fault put into the library: see mutations.py")
    parser.add_argument("--path", required=True)
    parser.add_argument("--hangs-s", type=float, default=HANGS_S)
    asked = parser.parse_args()
    from hostile.draw import draw
    from hostile.mutations import MUTATIONS
    from hostile.trainer import folders_below, line_of, play, prepare

    prepare()
    names = asked.moves.split(",") if asked.moves else None

    def play_one(seed: int) -> Line:
        return line_of(play(draw(seed, names), folders))

    with folders_below(Path(asked.path)) as folders, MUTATIONS[asked.mutation]():
        first, end, step = map(int, asked.seeds.split(":"))
        tend(range(first, end, step), play_one, lambda line: print(json.dumps(line), flush=True), asked.hangs_s)


if __name__ == "__main__":
    main()
