"""A process that is killed at random instants, and started again, until it comes to its end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence

import torch
from warm_start import warm_start

_KILLS = 4


def killed_until_it_ends(command: Sequence[str], *, seed: int, lag_steps: int, pause_s: float) -> dict[str, int]:
    """Kill a training four times, each time some steps after the last one that it had begun.

    It says "loaded 3", "begun 4", and whatever else, each with a number. Fails if a step is lost that was durable by
    then: all but the last `lag_steps` that were begun.
    pause_s   that passes at most between the last step that is begun and the kill
    returns   the last number of each word
    """
    chance = torch.Generator().manual_seed(seed)
    begun, kills, said = 0, 0, dict[str, int]()
    while True:
        with warm_start("-c"), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            wanted = begun + lag_steps + int(torch.randint(0, 9, (1,), generator=chance))
            for line in process.stdout:
                word, number = line.split()
                said[word] = int(number)
                if word == "loaded":
                    assert said[word] >= begun - lag_steps, f"step {begun} was begun"
                if word not in ("loaded", "begun"):
                    continue
                begun = said[word]
                if word == "begun" and begun >= wanted and kills < _KILLS:
                    time.sleep(float(torch.rand(1, generator=chance)) * pause_s)
                    process.send_signal(signal.SIGKILL)
                    break
        if process.returncode != -signal.SIGKILL:
            break
        kills += 1
    assert process.returncode == 0
    assert kills == _KILLS
    return said
