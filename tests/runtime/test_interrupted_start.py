"""Ctrl-C while a first save starts its threads: the process ends, at whatever time it arrives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SWEEP = '''
import gc, os, signal, sys, threading, time
import torch
import flowstone as fs, flowstone.checkpointer

root, instants = sys.argv[1], int(sys.argv[2])

def first_save(path):
    layers = [torch.nn.Linear(256, 256) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fs.Checkpointer(path).save(1, {"model": model, "optimizer": optimizer}).committed.result()

def interrupted(number):
    """The first `number` waits for a thread to begin are left alone; the next is interrupted as by Ctrl-C."""
    wait, count = threading.Event.wait, [0]
    def interrupting(event, timeout=None):
        begins = sys._getframe(1).f_code.co_name == "start" and threading.current_thread() is threading.main_thread()
        count[0] += begins
        if begins and count[0] == number + 1:
            raise KeyboardInterrupt
        return wait(event, timeout)
    threading.Event.wait = interrupting

def ended(child, limit_s):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False

torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # imports half of torch: no part of a first save
gc.collect()
gc.freeze()

hung = []
for at in range(-4, instants):
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if at < 0:
            interrupted(-at - 1)
        os.write(go, b"!")
        first_save(f"{root}/{at}")
        break  # and through all that Python does at the end of a script
    os.read(ready, 1)
    os.close(ready), os.close(go)
    if at >= 0:
        time.sleep(at * 0.006)
        os.kill(child, signal.SIGINT)
    if not ended(child, 120):
        hung.append(at)
else:
    print(hung)
'''


def test_ctrl_c_in_a_first_save_ends_the_process_whenever_it_comes(tmp_path: Path) -> None:
    """One process imports torch, and is forked for each instant; negative ones are in the midst of a thread's start."""
    command = [sys.executable, "-c", SWEEP, str(tmp_path), "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
