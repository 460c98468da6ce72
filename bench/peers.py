"""One of several nodes is lost, with its trainer, agent and memory: how long does it take to load its part from others?

    PYTHONPATH=src python -m bench.peers [--nodes 4] [--bytes 250e6] [--mbit-per-s 1000] [--runs 3] [--beside 40]

Each node has a network of its own (a network namespace, so this needs root), a memory agent, and one trainer with its
shard of a tensor. Links are shaped in both directions. All nodes save into fs.PeerMemory. Then the last node's agent is
killed, with all data that it holds, and the job restarts. Prints, for copies and for parity: the save, from its start
to its commit; the lost node's load; the bytes over its link meanwhile, and their rate relative to the shaped rate. The
loaded data is compared bit for bit.

With --beside no node is lost. All train for that many seconds in each setting: without saves, with copies in one burst
(spread=0), and with spread copies; they save every --interval-s seconds. A step is an all-reduce of --step-bytes over
the same links, and a pause as long as that takes on an idle link. Prints the steps' times.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.networks import INTERFACE, Networks, refusal, several_networks

_WORKER = """
import json, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import flowstone as fs
act, how, elements = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
memory = fs.PeerMemory("bench", secret="a secret of this benchmark alone", replicas=how.get("replicas"),
                       parity=tuple(how["parity"]) if "parity" in how else None)
made = lambda: torch.randint(-2**62, 2**62, (elements,), generator=torch.Generator().manual_seed(rank))
interfaces = lambda: [line for line in open("/proc/self/net/dev").readlines()[2:] if " lo:" not in line]
received = lambda: sum(int(line.split()[1]) for line in interfaces())
part = made() if act == "save" else torch.zeros(elements, dtype=torch.int64)
state = {"w": fs.Shard(part, (size * elements,), (rank * elements,))}
with fs.Checkpointer(memory) as checkpointer:
    before, begin = received(), time.perf_counter()
    if act == "save":
        checkpointer.save(1, state).committed.result()
    else:
        checkpointer.load(state)
    seconds = time.perf_counter() - begin
    moved = received() - before
print(json.dumps({"seconds": seconds, "received": moved, "same": bool(torch.equal(part, made()))}), flush=True)
os._exit(0)
"""


_TRAINER = """
import json, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import flowstone as fs
how = json.loads(sys.argv[1])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
gradients = torch.ones(how["step_bytes"] // 4)
alone = []
for _ in range(10):
    begin = time.perf_counter()
    dist.all_reduce(gradients)
    gradients /= size
    alone.append(time.perf_counter() - begin)
pause = torch.tensor([sorted(alone)[5]], dtype=torch.float64)
dist.broadcast(pause, 0)
count = how["elements"]
saved, took, commits = {"w": fs.Shard(torch.ones(count), (size * count,), (rank * count,))}, [], []
memory = fs.PeerMemory("bench", secret="a secret of this benchmark alone", spread=how["spread"])
with fs.Checkpointer(memory) as checkpointer:
    began, due, step = time.perf_counter(), torch.zeros(2, dtype=torch.float64), 0
    while True:
        due[0], due[1] = time.perf_counter() - began, step
        dist.broadcast(due, 0)
        if due[0] > how["seconds"]:
            break
        if how["saves"] and due[0] >= how["interval_s"] * step:
            step += 1
            save, asked = checkpointer.save(step, saved), time.perf_counter()
            save.committed.add_done_callback(lambda _, asked=asked: commits.append(time.perf_counter() - asked))
        begin = time.perf_counter()
        dist.all_reduce(gradients)
        gradients /= size
        time.sleep(float(pause))
        if step > 1 or not how["saves"]:
            took.append(time.perf_counter() - begin)
print(json.dumps({"took": took, "commits": commits[1:]}), flush=True)
os._exit(0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--bytes", type=float, default=250e6, help="that each node saves")
    parser.add_argument("--mbit-per-s", type=float, default=1000.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--beside", type=float, default=0.0, help="train for so many seconds in each way, lose none")
    parser.add_argument("--interval-s", type=float, default=8.0, help="between two saves of that training")
    parser.add_argument("--step-bytes", type=float, default=4e6, help="that a step of it all-reduces")
    options = parser.parse_args()
    if 0 < options.beside <= options.interval_s:
        parser.error("--beside must be longer than --interval-s: steps before the second save are left out")
    if why := refusal():
        sys.exit(why)
    print(f"{len(os.sched_getaffinity(0))} cores; {options.nodes} nodes, {options.bytes / 1e6:.0f} MB each, "
          f"links of {options.mbit_per_s:g} Mbit/s")
    if options.beside:
        _train_beside(options)
        return
    for how in ({"replicas": 2}, {"parity": [options.nodes - 1, 1]}):
        runs = [_lose_one(options, how) for _ in range(options.runs)]
        link = options.mbit_per_s * 1e6 / 8
        parts = {
            "saved, s": [row["saved_s"] for row in runs], "load, s": [row["seconds"] for row in runs],
            "received, MB": [row["received"] / 1e6 for row in runs],
            "of the link's rate": [row["received"] / row["seconds"] / link for row in runs],
        }
        print(f"{json.dumps(how)}: " + "; ".join(
            f"{name} {median(values):.3g} ({min(values):.3g}-{max(values):.3g})" for name, values in parts.items()
        ), flush=True)


@contextmanager
def _nodes(options: argparse.Namespace) -> Iterator[tuple[Networks, list[Path]]]:
    """Networks, and each node's directory; agents that are started there are stopped at the end."""
    with (
        TemporaryDirectory(prefix="flowstone-bench-") as above,
        several_networks(options.nodes, options.mbit_per_s) as on, ExitStack() as stack,
    ):
        directories = [Path(above) / f"node-{node}" for node in range(options.nodes)]
        for directory in directories:
            stack.callback(_stop, directory)
        yield on, directories


def _train_beside(options: argparse.Namespace) -> None:
    """Print how long steps take in each setting."""
    for name, saves, spread in (("no saves", False, 0.5), ("in one burst", True, 0.0), ("spread", True, 0.5)):
        how = {
            "elements": int(options.bytes) // 4, "step_bytes": int(options.step_bytes), "seconds": options.beside,
            "interval_s": options.interval_s, "saves": saves, "spread": spread,
        }
        with _nodes(options) as (on, directories):
            result = _run(on, directories, _TRAINER, json.dumps(how))[0]
        took, commits = sorted(result["took"]), result["commits"]
        shown = ", ".join(f"{commit:.2f}" for commit in commits) or "none"
        parts = {
            "mean": sum(took) / len(took), "median": median(took), "95%": took[len(took) * 95 // 100],
            "longest": took[-1],
        }
        print(f"{name}: {len(took)} steps, ms: " + ", ".join(f"{part} {1e3 * s:.1f}" for part, s in parts.items())
              + f"; committed after, s: {shown}", flush=True)


def _lose_one(options: argparse.Namespace, how: Mapping[str, Any]) -> dict[str, float]:
    """The lost node's report of its load, and how long the save took."""
    with _nodes(options) as (on, directories):
        saved = _run(on, directories, _WORKER, "save", json.dumps(how), str(int(options.bytes) // 8))
        _lose(directories[-1])
        results = _run(on, directories, _WORKER, "load", json.dumps(how), str(int(options.bytes) // 8))
        assert all(row["same"] for row in results), results
        return {**results[-1], "saved_s": max(row["seconds"] for row in saved)}


def _run(on: Networks, directories: Sequence[Path], program: str, *words: str) -> list[dict[str, Any]]:
    """The output of a program on each node."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes = []
    for rank, (name, directory) in enumerate(zip(on.names, directories, strict=True)):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(len(directories)), "MASTER_ADDR": on.host,
            "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": INTERFACE, "FLOWSTONE_AGENT_DIR": str(directory),
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", name, sys.executable, "-c", program, *words]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=550)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return [json.loads(output) for output in outputs]


def _lose(directory: Path) -> None:
    """Kill the agent that listens there. Its server ends with it, and its memory is freed."""
    from flowstone.store.memory.agent_wire import SOCKET_NAME
    from flowstone.store.memory.local_sockets import peer_credentials

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(directory / SOCKET_NAME))
        agent = peer_credentials(connection)[0]
    os.kill(agent, signal.SIGKILL)


def _stop(directory: Path) -> None:
    command = [sys.executable, "-m", "flowstone", "agent", "--stop"]
    subprocess.run(command, env=os.environ | {"FLOWSTONE_AGENT_DIR": str(directory)}, capture_output=True, check=False)


if __name__ == "__main__":
    main()
