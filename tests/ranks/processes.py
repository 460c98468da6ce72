"""Real ranks: processes with torch.distributed over gloo, each running the same function of a test module.

One fork server starts all of them. It is a process without threads that has imported torch, which takes seconds, once.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.networks import Networks

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 400.0  # only ranks that hang take so long, on a busy machine too
_CLONE_NEWNET = 0x40000000
LEFT_S = 20.0  # for ranks to end once another has failed


@dataclass
class Ended:
    """How a rank ended: what its function returned (as JSON), or how it died, and what it said."""

    code: int
    result: object
    said: str


class Rank:
    """A process, as subprocess.Popen shows them. Its parent is the fork server."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = fork_server().ask("end", self.pid)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout_s)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, how: int) -> None:
        if self.poll() is None:  # its number is not reused before it was waited for
            os.kill(self.pid, how)


class ForkServer:
    """Starts processes, and knows how they ended. They end when it does, and it when this process does."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=HERE,
            text=True,
        )

    def ask(self, *words: object) -> int | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server of the ranks has died"
        result: int | None = json.loads(answer)
        return result


@functools.cache
def fork_server() -> ForkServer:
    return ForkServer()


class Ranks:
    """`size` processes that run `module.function(rank, *arguments)`. `networks`: each in one of its own."""

    def __init__(
        self, size: int, module: str, function: str, *arguments: object, networks: Networks | None = None
    ) -> None:
        import torch.distributed as dist

        self._desk = tempfile.TemporaryDirectory()
        # As under torchrun: no rank keeps the job's store, so that it outlives each of them.
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.processes = []
        for rank in range(size):
            act = [module, function, json.dumps(arguments), self._file(rank)]
            where = ["127.0.0.1", ""] if networks is None else [networks.host, networks.names[rank]]
            pid = fork_server().ask("start", rank, size, [self._store.port, *where], *act)
            assert pid is not None
            self.processes.append(Rank(pid))

    def kill(self, rank: int, how: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(how)

    def said(self, rank: int) -> str:
        """So far."""
        path = Path(self._file(rank) + ".said")
        return path.read_text(errors="replace") if path.exists() else ""

    def end(self, timeout_s: float = TIMEOUT_S) -> list[Ended]:
        """Wait for all, not long for those that one has left; what still runs is killed, and that fails the test."""
        deadline = time.monotonic() + timeout_s
        while (codes := [process.poll() for process in self.processes]).count(None) and time.monotonic() < deadline:
            if any(codes):
                deadline = min(deadline, time.monotonic() + LEFT_S)
            time.sleep(0.01)
        late = [rank for rank, code in enumerate(codes) if code is None]
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait(TIMEOUT_S)
        ended = [self._ended(rank) for rank in range(len(self.processes))]
        self._desk.cleanup()
        words = "\n".join(f"--- rank {rank}\n{process.said}" for rank, process in enumerate(ended))
        assert not late, f"ranks {late} did not end\n{words}"
        return ended

    def results(self) -> list[object]:
        """What the function returned on each rank; a rank that fails fails the test, with what all have said."""
        ended = self.end()
        words = "\n".join(f"--- rank {rank} ({process.code})\n{process.said}" for rank, process in enumerate(ended))
        assert all(rank.code == 0 for rank in ended), words
        return [rank.result for rank in ended]

    def _ended(self, rank: int) -> Ended:
        path = Path(self._file(rank))
        result = json.loads(path.read_text()) if path.exists() else None
        text = Path(self._file(rank) + ".said").read_text(errors="replace")
        code = self.processes[rank].returncode
        assert code is not None
        return Ended(code, result, text)

    def _file(self, rank: int) -> str:
        return f"{self._desk.name}/{rank}"


def run(size: int, module: str, function: str, *arguments: object) -> list[object]:
    """What the function returned on each of `size` ranks."""
    return Ranks(size, module, function, *arguments).results()


# In the fork server


def tend() -> None:
    """Fork what is asked for, and report how it ended, until the pipe is closed."""
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "support")]
    import acts
    import torch

    import flowstone.checkpointer  # noqa: F401

    torch.set_num_threads(1)
    acts.state_of("whole")  # an optimizer's first step imports another 200 modules
    gc.collect()
    gc.freeze()  # a rank's collections would copy what it shares
    alive = set()
    for line in sys.stdin:
        verb, *words = json.loads(line)
        answer: int | None
        if verb == "start":
            answer = os.fork()
            if answer == 0:
                _become_rank(*words)
            alive.add(answer)
        else:
            result, status = os.waitpid(words[0], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if result else None
            if result:
                alive.discard(result)
        print(json.dumps(answer), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def _become_rank(
    rank: int, size: int, where: tuple[int, str, str], module: str, function: str, arguments: str, path: str
) -> None:
    """This process is a rank from here on, and does not return."""
    message = os.open(f"{path}.said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, own in ((nothing, 0), (message, 1), (message, 2)):
        os.dup2(fd, own)
    try:
        result = _act(rank, size, where, module, function, arguments)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # the others must not wait for us in gloo
    Path(path).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which aborts one process in eight, whatever it has run


def _act(
    rank: int, size: int, where: tuple[int, str, str], module: str, function: str, arguments: str
) -> object:
    """`where`: the job's store, its port and address; and the network to be in, "" for the one of all others."""
    import torch.distributed as dist

    port, address, network = where
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
    if network:
        _enter(network)
        os.environ |= {"MASTER_ADDR": address, "GLOO_SOCKET_IFNAME": "eth0"}
    store = dist.TCPStore(address, port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return getattr(importlib.import_module(module), function)(rank, *json.loads(arguments))


def _enter(network: str) -> None:
    """This thread, and what it starts, is in that network from here on."""
    import ctypes

    with open(f"/run/netns/{network}") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {network}")


if __name__ == "__main__":
    tend()
