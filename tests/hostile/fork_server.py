"""Plays many loops: forks processes that play some seeds each, and prints the result of each loop as a line of JSON.

If a process dies or hangs, this one prints the line of its seed with its output, and a new process plays the following
seeds. It is started as a program, once for each processor. It has imported torch, and has no threads.
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

BATCH = 25  # seeds that one process plays before a new one is forked
HANGS_S = 90.0
Line = dict[str, Any]


def tend(seeds: Sequence[int], play_one: Callable[[int], Line], tell: Callable[[Line], None], hangs_s: float) -> None:
    """Play all `seeds`, in processes of `BATCH`. Prints each line as soon as it is known."""
    left = list(seeds)
    while left:
        batch, left = left[:BATCH], left[BATCH:]
        while batch:
            done = _batch(batch, play_one, tell, hangs_s)
            batch = batch[done:]


def _batch(seeds: Sequence[int], play_one: Callable[[int], Line], tell: Callable[[Line], None], hangs_s: float) -> int:
    """The number of seeds with a line: all, or up to the one that ended the process."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile("w+", errors="replace") as message:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _play(seeds, play_one, writer, message)
        os.close(writer)
        done = 0
        with open(reader) as lines:
            while done < len(seeds):
                ready, _, _ = select.select([lines], [], [], hangs_s)
                line = lines.readline() if ready else None
                if not line:
                    tell(_ended(seeds[done], child, message, hung=not ready))
                    return done + 1
                tell(json.loads(line))
                done += 1
        _, _status = os.waitpid(child, 0)
    return done


def _play(seeds: Sequence[int], play_one: Callable[[int], Line], writer: int, stream: IO[str]) -> None:
    """In the child: play, print the results, and do not return."""
    os.dup2(stream.fileno(), 2)
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        for seed in seeds:
            os.write(writer, json.dumps(play_one(seed)).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def _ended(seed: int, child: int, stream: IO[str], *, hung: bool) -> Line:
    if hung:
        os.kill(child, signal.SIGUSR1)  # prints the stack of every thread
        time.sleep(0.5)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    how = "it hung" if hung else f"it died of {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"
    stream.seek(0)
    return {"seed": seed, "problems": [f"{how}\n{stream.read()[-6000:]}"], "moves": [], "counts": {}}


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
