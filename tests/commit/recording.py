"""A store that records its changes."""

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

    def _note(self, kind: str) -> None:
        if self._refuse(kind):
            raise StorageError(f"cannot {kind}", errno=5, next="check the disk")
        self.done.append(kind)

    def rename(self, source: str, target: str) -> None:
        self._note(f"rename {source} {target}")
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._note(f"remove {path.rpartition('/')[2]}")
        super().remove(path)

    def sync_directory(self, path: str = "") -> None:
        self._note(f"sync {path}")
        super().sync_directory(path)
