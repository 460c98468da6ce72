"""Large offline work on a cluster: one function, called for each part of the work by tasks of Ray.

The functions are those that one process calls, too. Each may be called again for a part that it has done already, or
begun: Ray does so when a worker or a node has died.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from typing import Any, TypeVar

import msgspec

from flowstone._version import __version__
from flowstone.errors import ArgumentError, CancelledError, FlowstoneError, FrameworkError, StorageError

Shared = TypeVar("Shared")
Part = TypeVar("Part")
Result = TypeVar("Result")

RAY = "ray[train]==2.60.0"
"""What is tested."""
_RETRIES_MAX = 3  # of a part whose worker has died
_PARTS_AHEAD = 2  # of each CPU, begun or waiting in Ray's queue: results are taken in order, and one may take longer
_CANCEL_TIMEOUT_S = _CONNECT_TIMEOUT_S = 10.0
PARTS_OF_CPU = 4
"""Into how many parts work is divided for each CPU, so that all end at about the same time."""


class _Outcome(msgspec.Struct, frozen=True):
    """What a task returns: a result, or the error that the work has raised."""

    result: Any = None
    error: Exception | None = None


class Cluster:
    """A cluster of Ray that this process is connected to. `cpus`: how many tasks it does at once."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.cpus = int(ray.cluster_resources().get("CPU", 0))
        if self.cpus < 1:
            raise ArgumentError("the cluster of Ray has no CPU for tasks", next="add nodes to it, or run without --ray")

    def each(
        self, work: Callable[[Shared, Part], Result], shared: Shared, parts: Iterable[Part]
    ) -> Generator[Result, None, None]:
        """What `work(shared, part)` returns, in the order of the parts; so many are under way as there are CPUs.

        Close the iterator: what is still under way is interrupted then.

        raises  what `work` raises; CancelledError for a part whose workers have died again and again
        """
        options = {"num_cpus": 1, "max_retries": _RETRIES_MAX, "scheduling_strategy": "SPREAD"}
        task = self._ray.remote(**options)(_in_task)
        kept = self._ray.put(shared)
        begun = (task.remote(__version__, work, kept, one) for one in parts)
        under_way = deque(islice(begun, _PARTS_AHEAD * self.cpus))
        try:
            while under_way:
                result = self._result(under_way[0])
                under_way.popleft()
                under_way.extend(islice(begun, 1))
                yield result
        finally:
            self._end(under_way)

    def _result(self, begun: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            outcome = self._ray.get(begun)
        except exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            if "No module named" in reason[0]:
                raise FrameworkError(
                    "a node of the cluster cannot import what the work needs", found=reason[0],
                    next=f"install flowstone {__version__} on every node",
                ) from error
            if isinstance(error, exceptions.RayTaskError):
                raise  # a defect of ours
            raise CancelledError(
                "Ray has given up a part of the work", found=f"{type(error).__name__}: {reason[0]}",
                next="see Ray's logs for what ended its workers; then run the same command again",
            ) from error
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    def _end(self, under_way: Iterable[Any]) -> None:
        left = list(under_way)
        if not left:
            return
        _, left = self._ray.wait(left, num_returns=len(left), timeout=0)
        for begun in left:
            # An interrupt in the worker. By force, Ray 2.60 aborts this process now and then, if a task ends meanwhile:
            # "Tried to complete task that was not pending".
            self._ray.cancel(begun)
        if left:
            self._ray.wait(left, num_returns=len(left), timeout=_CANCEL_TIMEOUT_S)


def _in_task(version: str, work: Callable[[Any, Any], Any], shared: Any, part: Any) -> _Outcome:
    if version != __version__:
        return _Outcome(error=FrameworkError(
            f"{socket.gethostname()}, a node of the cluster, has another Flowstone", expected=version,
            found=__version__, next="install the same on every node",
        ))
    try:
        return _Outcome(work(shared, part))
    except (FlowstoneError, OSError) as error:  # these are for people; Ray would wrap them
        return _Outcome(error=error)


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """The cluster that RAY_ADDRESS names, or one that runs on this machine; where there is none, one of this machine
    for as long as the work takes. A process that is connected stays so.

    raises  FrameworkError  Ray is not installed
            CancelledError  there is no cluster at RAY_ADDRESS
    """
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise FrameworkError("Ray is not installed", next=f'pip install "{RAY}"') from error
    if ray.is_initialized():
        yield Cluster(ray)
        return
    _check_address(os.environ.get("RAY_ADDRESS", ""))
    ray.init(logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise CancelledError where no one answers at `host:port`: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # none, or one of Ray's own words
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise CancelledError(
            f"there is no cluster of Ray at {address}, which RAY_ADDRESS names", found=error,
            next="set it to one that runs, or to `local` for one on this machine while the work takes",
        ) from error


def not_shared(path: object, found: object) -> StorageError:
    """The error of a node that does not see a file as the process sees it that hands out the parts."""
    return StorageError(
        f"{socket.gethostname()}, a node of the cluster, does not see {path} as the node where the work began",
        found=found, next="put it where every node has the same file system at the same path, or run without --ray",
    )


__all__ = ["Cluster", "PARTS_OF_CPU", "not_shared", "ray_cluster"]
