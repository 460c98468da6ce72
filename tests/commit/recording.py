"""A store that notes what is changed in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flowstone.errors import StorageError
from flowstone.store.local import LocalStore


class Recording(LocalStore):
    """Notes each change, and refuses those that `refuse` names."""

    def __init__(self, root: Path, refuse: Callable[[str], bool] = lambda _: False) -> None:
        super().__init__(root)
        self.done: list[str] = []
        self._refuse = refuse

    def _note(self, what: str) -> None:
        if self._refuse(what):
            raise StorageError(f"cannot {what}", errno=5, next="check the disk")
        self.done.append(what)

    def rename(self, source: str, target: str) -> None:
        self._note(f"rename {source} {target}")
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._note(f"remove {path.rpartition('/')[2]}")
        super().remove(path)

    def sync_directory(self, path: str = "") -> None:
        self._note(f"sync {path}")
        super().sync_directory(path)
