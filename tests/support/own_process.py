"""Run a test's function in a process of its own, because it sets permanent limits or may hang."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

# Torch is imported once, in a server from which each process is forked.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["flowstone", "torch"])


def run_in_own_process(act: Callable[..., Any], *arguments: object, timeout_s: float = 120.0) -> Any:
    """The result of `act` (a module's function) there. If it raises, is killed, or does not end, the test fails."""
    into, out = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_run, args=(out, act, arguments), daemon=True)
    process.start()
    out.close()
    try:
        if not into.poll(timeout_s):
            pytest.fail(f"{act.__name__} had no result after {timeout_s} s")
        result, failure = into.recv()
        process.join(timeout_s)
        assert process.exitcode is not None, f"{act.__name__} had its result, and its process did not end"
    except EOFError:
        process.join(timeout_s)
        code = process.exitcode or 0
        pytest.fail(f"{act.__name__} was ended by {signal.Signals(-code).name if code < 0 else f'exit status {code}'}")
    finally:
        process.kill()
        into.close()
    assert failure is None, f"{act.__name__} raised, in its process:\n{failure}"
    return result


def _run(out: Connection, act: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    try:
        out.send((act(*arguments), None))
    except BaseException:
        out.send((None, traceback.format_exc()))


@contextmanager
def warnings_heard() -> Iterator[list[str]]:
    """The warnings of Flowstone's logger meanwhile, in a process without pytest's log capture."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flowstone")
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
