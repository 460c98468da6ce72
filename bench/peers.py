"""One node of several is lost, with its trainer, agent and memory: how long its part takes to come back from others.

    PYTHONPATH=src python -m bench.peers [--nodes 4] [--bytes 250e6] [--mbit-per-s 1000] [--runs 3]

Each node has a network of its own (a namespace of the kernel, so this needs root), a memory agent, and one trainer with
its shard of a tensor. Links are shaped in both directions. All save into fs.PeerMemory; then the last node's agent and
all that it holds are killed, and the job starts again. Told are, for copies and for parity: the save, from its start to
its commit; the lost node's load; the bytes that came over its link meanwhile, and their rate as a share of what the
link was shaped to. What is loaded is compared, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--bytes", type=float, default=250e6, help="that each node saves")
    parser.add_argument("--mbit-per-s", type=float, default=1000.0)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    if why := refusal():
        sys.exit(why)
    print(f"{len(os.sched_getaffinity(0))} cores; {options.nodes} nodes, {options.bytes / 1e6:.0f} MB each, "
          f"links of {options.mbit_per_s:g} Mbit/s")
    for how in ({"replicas": 2}, {"parity": [options.nodes - 1, 1]}):
        told = [_lose_one(options, how) for _ in range(options.runs)]
        link = options.mbit_per_s * 1e6 / 8
        parts = {
            "saved, s": [one["saved_s"] for one in told], "load, s": [one["seconds"] for one in told],
            "received, MB": [one["received"] / 1e6 for one in told],
            "of the link's rate": [one["received"] / one["seconds"] / link for one in told],
        }
        print(f"{json.dumps(how)}: " + "; ".join(
            f"{name} {median(values):.3g} ({min(values):.3g}-{max(values):.3g})" for name, values in parts.items()
        ), flush=True)


def _lose_one(options: argparse.Namespace, how: Mapping[str, Any]) -> dict[str, float]:
    """What the lost node's process tells of its load, and how long the save took."""
    with (
        TemporaryDirectory(prefix="flowstone-bench-") as above,
        several_networks(options.nodes, options.mbit_per_s) as on, ExitStack() as stack,
    ):
        directories = [Path(above) / f"node-{node}" for node in range(options.nodes)]
        for directory in directories:
            stack.callback(_stop, directory)
        saved = _run(on, directories, "save", how, int(options.bytes) // 8)
        _lose(directories[-1])
        told = _run(on, directories, "load", how, int(options.bytes) // 8)
        assert all(one["same"] for one in told), told
        return {**told[-1], "saved_s": max(one["seconds"] for one in saved)}


def _run(
    on: Networks, directories: Sequence[Path], act: str, how: Mapping[str, Any], elements: int
) -> list[dict[str, float]]:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes = []
    for rank, (name, directory) in enumerate(zip(on.names, directories, strict=True)):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(len(directories)), "MASTER_ADDR": on.host,
            "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": INTERFACE, "FLOWSTONE_AGENT_DIR": str(directory),
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", name, sys.executable, "-c", _WORKER, act, json.dumps(how), str(elements)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=550)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), said
    return [json.loads(one) for one in said]


def _lose(directory: Path) -> None:
    """Kill the agent that listens there. Its server ends with it, and its memory is gone."""
    from flowstone.store.agent_wire import SOCKET_NAME, peer

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(directory / SOCKET_NAME))
        agent = peer(connection)[0]
    os.kill(agent, signal.SIGKILL)


def _stop(directory: Path) -> None:
    command = [sys.executable, "-m", "flowstone", "agent", "--stop"]
    subprocess.run(command, env=os.environ | {"FLOWSTONE_AGENT_DIR": str(directory)}, capture_output=True, check=False)


if __name__ == "__main__":
    main()
