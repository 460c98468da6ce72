"""A staged (copied) state, of which some copies may still be running."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any


class StagedState(dict[str, Any]):
    """The staged state, a dict. The first access to it, by DCP on the saving thread, waits until everything is copied.

    If it is pickled, for example for a process executor, it becomes a plain dict. If a copy has failed, an
    access raises the error of that copy.
    """

    def __init__(self, state: dict[str, Any], wait: Callable[[], None]) -> None:
        super().__init__()
        self._state, self._wait, self._lock = state, wait, threading.Lock()
        self._is_filled = False

    def fill(self) -> None:
        with self._lock:
            if not self._is_filled:
                self._wait()
                dict.update(self, self._state)
                self._state, self._is_filled = {}, True

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def _waiting_method(name: str) -> Any:
    method = getattr(dict, name)

    @wraps(method)
    def look(self: StagedState, *args: Any, **named: Any) -> Any:
        self.fill()
        return method(self, *args, **named)

    return look


for _name in (
    "__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__or__", "__repr__",
    "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault",
    "update", "values",
):
    setattr(StagedState, _name, _waiting_method(_name))
