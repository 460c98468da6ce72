"""Replica groups of torchft on one lighthouse: start them, kill them, wait for them, and read their results."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs import HERE

import flowstone as fs

STEPS = 10


class Job:
    """Replica groups, each of one process or of several. `ranks`: how many a group has."""

    def __init__(self, folder: Path, lighthouse: str, ranks: int) -> None:
        self.folder, self.lighthouse, self.runs, self.ranks = folder, lighthouse, folder / "runs", ranks
        self.groups: dict[str, list[subprocess.Popen[bytes]]] = {}

    def start(self, name: str, number: int, **value: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        value |= {
            "lighthouse": self.lighthouse, "name": name, "number": number, "runs": str(self.runs), "port": port,
            "ranks": self.ranks,
        }
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.groups[name] = []
        for rank in range(self.ranks):
            value |= {"rank": rank, "out": str(self.folder / f"{name}-{rank}.json")}
            with (self.folder / f"{name}-{rank}.txt").open("a") as output:
                self.groups[name].append(subprocess.Popen(
                    [sys.executable, str(HERE / "torchft_act.py"), json.dumps(value)], stdout=output, stderr=output,
                    env=environment,
                ))

    def end(self, *names: str) -> list[int]:
        """An exit code for each group. One that failed ends the wait for the others, and all of its own ranks."""
        deadline = time.monotonic() + 900
        codes: list[int | None] = []
        while time.monotonic() < deadline:
            codes = [_code([group.poll() for group in self.groups[name]]) for name in names]
            if None not in codes or not {0, None} >= set(codes):
                break
            time.sleep(0.05)
        for name, code in zip(names, codes, strict=True):
            if code:
                self.kill(name)
        return [-99 if code is None else code for code in codes]

    def kill(self, *names: str) -> None:
        """All processes of groups, as a launcher does when one of them has died; of all groups if none is named."""
        for name in names or list(self.groups):
            for process in self.groups[name]:
                process.kill()
                process.wait()

    def said(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.folder.glob("*.txt")))

    def told(self, name: str, rank: int = 0) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.folder / f"{name}-{rank}.json").read_text())
        return record


def _code(codes: list[int | None]) -> int | None:
    """A group's: of a rank that failed, before all others; None while one runs and none has failed."""
    failed = [code for code in codes if code]
    return failed[0] if failed else None if None in codes else 0


@contextmanager
def job(folder: Path, ranks: int = 1) -> Iterator[Job]:
    from torchft.coordination import LighthouseServer

    folder.mkdir()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=200, quorum_tick_ms=50)
    made = Job(folder, f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}", ranks)
    try:
        yield made
    finally:
        made.kill()
        lighthouse.shutdown()


def undisturbed(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank of a job that nothing happens to ends with: the same in all groups."""
    with job(folder, ranks) as calm:
        calm.start("group_0", 0)
        calm.start("group_1", 1)
        assert calm.end("group_0", "group_1") == [0, 0], calm.said()
        value = [calm.told("group_0", rank) for rank in range(ranks)]
        for rank, result in enumerate(value):
            assert result["parts"] == calm.told("group_1", rank)["parts"]
            assert result["loaded"] is None
            assert result["manager"]["step"] == STEPS
    return value


def check(job: Job, whole: list[dict[str, Any]], *names: str, lost: tuple[int, ...] = ()) -> None:
    """The groups ended as those that were not disturbed, and every step of them is whole in the store.

    lost  steps of which the save may have died with the group that saved
    """
    for name in names:
        for rank, expected in enumerate(whole):
            assert job.told(name, rank)["parts"] == expected["parts"], job.said()
            assert job.told(name, rank)["manager"] == expected["manager"]
    for step in range(1, STEPS + 1):
        if step in lost and not (job.runs / f"step-{step:08d}").exists():
            continue
        saved = fs.open(job.runs, step)
        assert saved.verify().sound
        assert saved.manifest.ranks == job.ranks
        assert saved.objects["torchft"]["step"] == step
