"""Large offline work on a Ray cluster: one function, called for each part of the work by a task of Ray.

Without a cluster, a single process calls the same function. After a worker or a node has died, Ray may call the
function again for a part of the work that was begun or finished already.
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
"""The tested version."""
_RETRIES_MAX = 3  # how often a part is tried again after its worker has died
_PARTS_AHEAD = 2  # parts per CPU, running or in Ray's queue; results are taken in order, so a slow part delays others
_CANCEL_TIMEOUT_S = _CONNECT_TIMEOUT_S = 10.0
PARTS_OF_CPU = 4
"""Parts of the work per CPU: many, so that all CPUs finish at about the same time."""


class _Outcome(msgspec.Struct, frozen=True):
    """The outcome of a task: a result, or the error that the work raised."""

    result: Any = None
    error: Exception | None = None


class Cluster:
    """A Ray cluster to which this process is connected. `cpus`: how many tasks it runs at a time."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.cpus = int(ray.cluster_resources().get("CPU", 0))
        if self.cpus < 1:
            raise ArgumentError("the Ray cluster has no CPU for tasks", next="add nodes to it, or run without --ray")

    def each(
        self, work: Callable[[Shared, Part], Result], shared: Shared, parts: Iterable[Part]
    ) -> Generator[Result, None, None]:
        """Yield the result of `work(shared, part)` for each part, in order. As many parts run at a time as the cluster
        has CPUs. Close the iterator to interrupt the tasks that still run.

        raises  errors of `work`; CancelledError if the workers of a part died too often
        """
        options = {"num_cpus": 1, "max_retries": _RETRIES_MAX, "scheduling_strategy": "SPREAD"}
        task = self._ray.remote(**options)(_in_task)
        reference = self._ray.put(shared)
        begun = (task.remote(__version__, work, reference, part) for part in parts)
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
                    "a node of the Ray cluster cannot import a module that this command needs", found=reason[0],
                    next=f"install flowstone {__version__} on every node",
                ) from error
            if isinstance(error, exceptions.RayTaskError):
                raise  # a defect of Flowstone
            raise CancelledError(
                "Ray did not finish a task of this command", found=f"{type(error).__name__}: {reason[0]}",
                next="find the reason in Ray's logs, then run the same command again",
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
            # Interrupts the worker. With force=True, Ray 2.60 sometimes aborts this process, if a task ends meanwhile:
            # "Tried to complete task that was not pending".
            self._ray.cancel(begun)
        if left:
            self._ray.wait(left, num_returns=len(left), timeout=_CANCEL_TIMEOUT_S)


def _in_task(version: str, work: Callable[[Any, Any], Any], shared: Any, part: Any) -> _Outcome:
    if version != __version__:
        return _Outcome(error=FrameworkError(
            f"node {socket.gethostname()} of the Ray cluster has another version of Flowstone", expected=version,
            found=__version__, next="install the same version on every node",
        ))
    try:
        return _Outcome(work(shared, part))
    except (FlowstoneError, OSError) as error:  # returned, not raised: Ray would wrap the error in its own
        return _Outcome(error=error)


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """The cluster at RAY_ADDRESS, or else a cluster that runs on this machine. If there is none, one is started on this
    machine and stopped at the end of the block. A process that is already connected keeps its connection.

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
    """Raise CancelledError if nothing answers at `host:port`: Ray itself would retry for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # no address, or a special word of Ray
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise CancelledError(
            f"there is no Ray cluster at {address} (RAY_ADDRESS)", found=error,
            next="set RAY_ADDRESS to a running cluster, or to `local` to start one on this machine for this command",
        ) from error


def not_shared(path: object, details: object) -> StorageError:
    """The error for a node on which `path` is not the same file as for the process that distributes the work."""
    return StorageError(
        f"node {socket.gethostname()} of the Ray cluster sees another {path} than the node that started this command",
        found=details, next="use a file system that every node has at the same path, or run without --ray",
    )


__all__ = ["Cluster", "PARTS_OF_CPU", "not_shared", "ray_cluster"]
