"""Stage "facts": the hardware and software of the session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import flowstone as fs
from bench.gpu.accelerator import opened
from bench.gpu.options import emit, parse
from flowstone_study import machine

QUERY = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"


def main() -> None:
    options = parse()
    for name, value in machine.describe(options.scratch).items():
        emit(name, value)
    emit("python", sys.version.split()[0])
    emit("torch", torch.__version__)
    emit("flowstone", fs.__version__)
    emit("flowstone is at", str(Path(fs.__file__).parent))
    emit("free disk", shutil.disk_usage(options.scratch).free / 1e9, "GB")
    emit("NUMA nodes", len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))
    emit("locked memory", _limit_of_locked_memory())
    probe = subprocess.run(
        [sys.executable, "-m", "flowstone", "bench", "--probe", str(options.scratch), "--json"],
        capture_output=True, text=True, check=False,
    )
    emit("probe", probe.stdout.strip() or probe.stderr.strip())
    with opened(options) as device:
        emit("GPU", device.name)
    if shutil.which("nvidia-smi"):
        asked = subprocess.run(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        emit("nvidia-smi", (asked.stdout or asked.stderr).strip())
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES"):
        if variable in os.environ:
            emit(variable, os.environ[variable])


def _limit_of_locked_memory() -> str:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
