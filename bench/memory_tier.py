"""A state in the memory of a node: how long a save blocks training, and how long a restart after SIGKILL takes.

    PYTHONPATH=src python -m bench.memory_tier [--bytes 5e9] [--tensors 300] [--saves 6] [--step-s 3] [--restarts 3]

A trainer process, with parameters and their AdamW, saves into memory://bench after each step. A step is a pause, during
which the capture continues, and the optimizer's step. Then the trainer is killed, and another process creates the same
model and loads. Prints for each save how long `save` blocked, the wait at the fence, and the time until it was
committed; for each restart the seconds of `load`, and those since `import torch`, with and without creating the model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from statistics import median

RUN = "memory://bench"

_WORKER = """
import json, sys, time
import torch
start = time.perf_counter()
import flowstone as fs
from flowstone import events
size, tensors, saves, step_s = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
mode = sys.argv[5]
count = max(1, tensors // 3)
elements = int(size) // (4 * 3 * count)
model = torch.nn.ParameterList([torch.full((elements,), 0.5) for _ in range(count)])
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
gradient = torch.full((elements,), 1e-3)  # of all: no step changes it, and the memory is needed
for parameter in model:
    parameter.grad = gradient
    if mode == "load":  # slots as torch makes them, in memory that was touched before
        optimizer.state[parameter] = {
            "step": torch.zeros(()), "exp_avg": torch.ones(elements), "exp_avg_sq": torch.ones(elements)
        }
made = time.perf_counter()
told = []
checkpointer = fs.Checkpointer("memory://bench", on_event=told.append)
state = {"model": model, "optimizer": optimizer, "step": 0}
if mode == "load":
    begin = time.perf_counter()
    report = checkpointer.load(state)
    end = time.perf_counter()
    value = float(model[0].detach()[0])
    same = all(bool((parameter == value).all()) for parameter in model)
    print(json.dumps({
        "step": report.step, "load_s": end - begin, "all_s": end - start, "made_s": made - start, "same": same,
        "expected": report.step == state["step"],
    }), flush=True)
    raise SystemExit
optimizer.step()
for step in range(1, saves + 1):
    told.clear()
    state["step"] = step
    begin = time.perf_counter()
    save = checkpointer.save(step, state)
    blocked = time.perf_counter() - begin
    time.sleep(step_s)
    stepping = time.perf_counter()
    optimizer.step()
    stepped = time.perf_counter() - stepping
    waited = sum(one.waited_s for one in told if isinstance(one, events.Fenced))
    save.committed.result()
    took = next(one for one in told if isinstance(one, events.Committed))
    print(json.dumps({
        "step": step, "blocked_ms": 1e3 * blocked, "waited_ms": 1e3 * waited, "optimizer_s": stepped,
        "committed_s": took.seconds,
    }), flush=True)
time.sleep(1000)
"""


def worker(options: argparse.Namespace, mode: str) -> subprocess.Popen[str]:
    given = [options.bytes, options.tensors, options.saves, options.step_s, mode]
    command = [sys.executable, "-c", _WORKER, *map(str, given)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=5e9)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=3.0)
    parser.add_argument("--restarts", type=int, default=3, choices=range(1, 100), metavar="1..99")
    options = parser.parse_args()
    print(f"{options.bytes / 1e9:.2f} GB in {options.tensors} tensors, {len(os.sched_getaffinity(0))} cores")
    saved = train(options)
    later = saved[3:]
    blocked = sorted(row["blocked_ms"] for row in later)
    print(f"saves from the fourth on: blocked {spread(blocked)} ms, 95th percentile {share(blocked, 0.95):.3g} ms, "
          f"waited at the fence {spread([row['waited_ms'] for row in later])} ms, "
          f"committed after {spread([row['committed_s'] for row in later])} s")
    loads = [restart(options) for _ in range(options.restarts)]
    rate = options.bytes / 1e9 / median(load["load_s"] for load in loads)
    print(f"restarts: load {spread([load['load_s'] for load in loads])} s, {rate:.2f} GB/s; since `import torch` "
          f"{spread([load['all_s'] - load['made_s'] for load in loads])} s, with the making of the model "
          f"{spread([load['all_s'] for load in loads])} s")
    assert all(load["same"] and load["expected"] and load["step"] == options.saves for load in loads), loads
    subprocess.run([sys.executable, "-m", "flowstone", "agent", "--stop"], check=True)


def train(options: argparse.Namespace) -> list[dict[str, float]]:
    """Save, and be killed once everything is committed."""
    with worker(options, "train") as process:
        assert process.stdout is not None
        saved = []
        for line in process.stdout:
            saved.append(json.loads(line))
            print("  ".join(f"{name} {value:.4g}" for name, value in saved[-1].items()), flush=True)
            if len(saved) == options.saves:
                os.killpg(process.pid, signal.SIGKILL)
    return saved


def restart(options: argparse.Namespace) -> dict[str, float]:
    with worker(options, "load") as process:
        assert process.stdout is not None
        return json.loads(process.stdout.readline())  # type: ignore[no-any-return]


def share(ordered: list[float], part: float) -> float:
    """The least of these values that this share of them does not exceed."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def spread(values: list[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


if __name__ == "__main__":
    main()
