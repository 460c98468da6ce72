"""Faults put into the library, which the hostile trainer has to find: else it looks at nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import flowstone as fs
from flowstone.pipeline.rank_zero import RankZero
from flowstone.stage.fence import Fence
from flowstone.store.local_io import LocalWriting


@contextmanager
def blind() -> Iterator[None]:
    """No thread hears that the state has changed."""
    error = LocalWriting._error

    def deaf(writing: LocalWriting) -> fs.FlowstoneError | None:
        found = error(writing)
        return None if isinstance(found, fs.StateChangedError) else found

    with mock.patch.object(LocalWriting, "_error", deaf):
        yield


@contextmanager
def unfenced() -> Iterator[None]:
    """No step waits. What it changes is found, so that saves fail to which nothing has happened."""
    with mock.patch.object(Fence, "guard"):
        yield


@contextmanager
def mixing() -> Iterator[None]:
    """Replicas are not compared."""
    with mock.patch.object(RankZero, "replicas_differ", return_value=False):
        yield


@contextmanager
def none() -> Iterator[None]:
    """The library as it is."""
    yield


MUTATIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "": none, "blind": blind, "unfenced": unfenced, "mixing": mixing,
}
