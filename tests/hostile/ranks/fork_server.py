"""Plays many loops of several ranks, and prints the result of each as a line of JSON. Started as a program."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from hostile.ranks.draw import draw
from hostile.ranks.job import Jobs
from hostile.ranks.play import play
from hostile.trainer import folders_below, line_of


def prepare() -> None:
    """Done once by the process from which all ranks are forked: it imports, and starts no thread."""
    import flowstone.checkpointer
    from hostile.ranks import loop, states
    from hostile.states import OPTIMIZERS

    torch.set_num_threads(1)
    for kind in states.STEPPING:  # their first steps import hundreds of modules
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        OPTIMIZERS[kind]([parameter]).step()
    gc.collect()
    gc.freeze()
    del loop, flowstone


@contextlib.contextmanager
def players(path: Path, mutation: str = "") -> Iterator[tuple[tuple[Path, Path], Jobs]]:
    """The folder in which loops are played, and the jobs that play them."""
    jobs = Jobs(mutation)
    try:
        with folders_below(path) as folders:
            yield folders, jobs
    finally:
        jobs.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", required=True, help="first:end:step")
    parser.add_argument("--moves", default="")
    parser.add_argument("--mutation", default="", help="a fault put into the library: see mutations.py")
    parser.add_argument("--path", required=True)
    asked = parser.parse_args()
    prepare()
    names = asked.moves.split(",") if asked.moves else None
    with players(Path(asked.path), asked.mutation) as (folders, jobs):
        for seed in range(*map(int, asked.seeds.split(":"))):
            print(json.dumps(line_of(play(draw(seed, names), folders, jobs))), flush=True)


if __name__ == "__main__":
    main()
