"""Jobs of processes on one node that watch each other: an orderly exit is distinguished from a loss."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

PATIENCE_S = 120.0
ACT = """
import os, sys
from flowstone.replica.joined_job import JoinedJob

rank, port, listener = map(int, sys.argv[1:])
def lost(why):
    print("lost:", why, flush=True)
    os._exit(1)
job = JoinedJob(rank, 2, lost)
job.join(port, listener, 100)
print("joined", flush=True)
sys.stdin.readline()
job.leave()
os._exit(0)
"""


@pytest.fixture
def job() -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks, which have joined, and leave once they are given a line."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)
        port = listener.getsockname()[1]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", ACT, str(rank), str(port), str(-1 if rank else listener.fileno())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=False,
            )
            for rank in range(2)
        ]
    try:
        assert [process.stdout.readline() for process in processes if process.stdout] == ["joined\n"] * 2
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def let_leave(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def await_end_or_half_a_second(process: subprocess.Popen[str]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.5)


@pytest.mark.parametrize("first", [0, 1])
def test_who_leaves_in_order_is_not_lost_to_one_that_leaves_later(
    job: list[subprocess.Popen[str]], first: int
) -> None:
    let_leave(job[first])
    await_end_or_half_a_second(job[first])
    let_leave(job[1 - first])
    assert [process.wait(PATIENCE_S) for process in job] == [0, 0]


def test_a_rank_that_is_killed_is_lost_to_the_other(job: list[subprocess.Popen[str]]) -> None:
    job[1].send_signal(signal.SIGKILL)
    assert job[0].wait(PATIENCE_S) == 1
    assert job[0].stdout is not None
    assert job[0].stdout.read() == "lost: the replica of rank 1 has ended\n"


def test_rank_0_that_leaves_does_not_wait_for_one_that_is_killed(job: list[subprocess.Popen[str]]) -> None:
    let_leave(job[0])
    await_end_or_half_a_second(job[0])
    job[1].send_signal(signal.SIGKILL)
    assert job[0].wait(PATIENCE_S) == 0
