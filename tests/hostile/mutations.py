"""Faults inserted into the library. If the hostile trainer did not find them, it would check nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import flowstone as fs
from flowstone.coordination.rank_zero import RankZero
from flowstone.stage.fence import OptimizerFence
from flowstone.store.local_io import LocalWriteHandle


@contextmanager
def blind() -> Iterator[None]:
    """No thread is notified that the state has changed."""
    error = LocalWriteHandle._error

    def deaf(writing: LocalWriteHandle) -> fs.FlowstoneError | None:
        text = error(writing)
        return None if isinstance(text, fs.StateChangedError) else text

    with mock.patch.object(LocalWriteHandle, "_error", deaf):
        yield


@contextmanager
def unfenced() -> Iterator[None]:
    """No step waits. Its changes are detected, so undisturbed saves fail."""
    with mock.patch.object(OptimizerFence, "guard"):
        yield


@contextmanager
def mixing() -> Iterator[None]:
    """Replicas are not compared."""
    with mock.patch.object(RankZero, "replicas_differ", return_value=False):
        yield


@contextmanager
def none() -> Iterator[None]:
    """The unchanged library."""
    yield


MUTATIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "": none, "blind": blind, "unfenced": unfenced, "mixing": mixing,
}
