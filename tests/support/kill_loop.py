"""Kill a process at random times and restart it, until it completes."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence

import torch

from warm_start import warm_start

_KILLS = 4


def killed_until_it_ends(command: Sequence[str], *, seed: int, lag_steps: int, pause_s: float) -> dict[str, int]:
    """Kill a training four times, each time a few steps after the last one that it had begun.

    It prints "loaded 3", "begun 4", and other words, each with a number. The test fails if a durable step is lost: all
    steps that were begun are durable, except the last `lag_steps`.
    pause_s   the longest time between the start of the last step and the kill
    returns   the last number of each word
    """
    chance = torch.Generator().manual_seed(seed)
    begun, kills, message = 0, 0, dict[str, int]()
    while True:
        with warm_start("-c"), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            expected = begun + lag_steps + int(torch.randint(0, 9, (1,), generator=chance))
            for line in process.stdout:
                word, number = line.split()
                message[word] = int(number)
                if word == "loaded":
                    assert message[word] >= begun - lag_steps, f"step {begun} was begun"
                if word not in ("loaded", "begun"):
                    continue
                begun = message[word]
                if word == "begun" and begun >= expected and kills < _KILLS:
                    time.sleep(float(torch.rand(1, generator=chance)) * pause_s)
                    process.send_signal(signal.SIGKILL)
                    break
        if process.returncode != -signal.SIGKILL:
            break
        kills += 1
    assert process.returncode == 0
    assert kills == _KILLS
    return message
