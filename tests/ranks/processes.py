"""Real ranks: processes with torch.distributed over gloo, each running the same function of a test module."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 120.0


@dataclass
class Ended:
    """How a rank ended: what its function returned (as JSON), or how it died, and what it said."""

    code: int
    result: object
    said: str


class Ranks:
    """`size` processes that run `module.function(rank, *arguments)`."""

    def __init__(self, size: int, module: str, function: str, *arguments: object) -> None:
        self._desk = tempfile.TemporaryDirectory()
        # As under torchrun: no rank keeps the job's store, so that it outlives each of them.
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.processes = []
        for rank in range(size):
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(self._store.port),
                "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            words = [module, function, json.dumps(arguments), self._file(rank)]
            command = [sys.executable, str(HERE / "processes.py"), *words]
            with open(self._file(rank) + ".said", "wb") as said:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT, cwd=HERE)
                )

    def kill(self, rank: int, how: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(how)

    def end(self, timeout_s: float = TIMEOUT_S) -> list[Ended]:
        """Wait for all; what still runs after `timeout_s` is killed, and that fails the test."""
        late = []
        for rank, process in enumerate(self.processes):
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                late.append(rank)
        for process in self.processes:
            process.kill()
            process.wait()
        ended = [self._ended(rank) for rank in range(len(self.processes))]
        self._desk.cleanup()
        words = "\n".join(f"--- rank {rank}\n{one.said}" for rank, one in enumerate(ended))
        assert not late, f"ranks {late} did not end\n{words}"
        return ended

    def _ended(self, rank: int) -> Ended:
        path = Path(self._file(rank))
        result = json.loads(path.read_text()) if path.exists() else None
        said = Path(self._file(rank) + ".said").read_text(errors="replace")
        return Ended(self.processes[rank].returncode, result, said)

    def _file(self, rank: int) -> str:
        return f"{self._desk.name}/{rank}"


def run(size: int, module: str, function: str, *arguments: object) -> list[object]:
    """What the function returned on each rank; a rank that fails fails the test, with what all have said."""
    ended = Ranks(size, module, function, *arguments).end()
    words = "\n".join(f"--- rank {rank} ({one.code})\n{one.said}" for rank, one in enumerate(ended))
    assert all(one.code == 0 for one in ended), words
    return [one.result for one in ended]


def main(module: str, function: str, arguments: str, path: str) -> None:
    torch.set_num_threads(1)
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    try:
        result = getattr(importlib.import_module(module), function)(dist.get_rank(), *json.loads(arguments))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # the others must not wait for us in gloo
    Path(path).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which aborts one process in eight, whatever it has run


if __name__ == "__main__":
    main(*sys.argv[1:])
