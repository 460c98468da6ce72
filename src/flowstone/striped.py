"""`fs.Striped`: a store whose bytes are spread over several directories and buckets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flowstone.arguments import is_list, shown, store_at, to_store
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.striped.store import StripedStore


class Striped(StripedStore):
    """A store over several paths, such as local disks and a bucket, which are written and read at once.

    paths    directories, URLs of buckets, or stores. The first one, a directory, has the checkpoints, and what commits
             them; each rank's bytes are spread over all
    weights  what part each path is to get, against those of the others; None: as it is measured while it is written,
             the same for all at first. With 0 a path gets nothing more, and is read
    engine   how bytes move; each path has a queue of its own

    What a path refuses goes to the first one, and the path is left out for a while. A path that is not there when
    something is loaded from it is an error that names the segments. To open the first path is enough: it has noted the
    others (docs/STRIPED.md).

    The idea of several paths at once, weighted by their measured rates, is MLP-Offload's (A. Maurya et al., SC 2025).

    raises  ArgumentError  something else is given; one path twice; a first path that cannot rename directories
    """

    def __init__(
        self, paths: Sequence[str | os.PathLike[str] | Store], weights: Sequence[float | None] | None = None, *,
        engine: EngineOptions | None = None,
    ) -> None:
        if not is_list(paths) or not paths:
            raise ArgumentError(f"{shown(paths)} is not a list of paths", next="give a list: the first one commits")
        if not isinstance(engine, EngineOptions | None):
            raise ArgumentError(f"engine {shown(engine)} is not an EngineOptions", next="give fs.EngineOptions(...)")

        def opened(location: object) -> Store:
            place = to_store(location)
            return LocalStore(place, engine) if isinstance(place, Path) else store_at(place, engine)

        super().__init__(
            [opened(path) for path in paths], weights, opened=opened, watch=(engine or EngineOptions()).watch
        )


__all__ = ["Striped"]
