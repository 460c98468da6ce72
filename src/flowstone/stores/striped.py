"""`fs.Striped`: a store whose bytes are spread over several directories and buckets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.striped.store import StripedStore
from flowstone.stores.arguments import is_list, shown, store_at, to_store


class Striped(StripedStore):
    """A store over several paths, such as local disks and a bucket, which are written and read concurrently.

    paths    directories, URLs of buckets, or stores. The first path must be a directory: it gets the manifests, and
             checkpoints are committed there. Each rank's bytes are spread over all paths
    weights  each path's relative share of the bytes; None: in proportion to the measured write rates, at first equal. A
             path with weight 0 is read, but not written
    engine   I/O options (EngineOptions); each path has its own queue of requests

    Bytes that a path refuses go to another directory, and the refusing path is not used for a while. A load that needs
    a missing path raises an error that names the missing files. To open the store later, the first path alone is
    enough, because a file in it lists the other paths (docs/STRIPED.md).

    The idea of several paths at once, weighted by their measured rates, is MLP-Offload's (A. Maurya et al., SC 2025).

    raises  ArgumentError  an argument has another type, a path is given twice, or directories on the first path cannot
                           be renamed
    """

    def __init__(
        self, paths: Sequence[str | os.PathLike[str] | Store], weights: Sequence[float | None] | None = None, *,
        engine: EngineOptions | None = None,
    ) -> None:
        if not is_list(paths) or not paths:
            raise ArgumentError(
                f"{shown(paths)} is not a list of paths",
                next="give a list of directories or URLs; the first one must be a directory",
            )
        if not isinstance(engine, EngineOptions | None):
            raise ArgumentError(f"engine {shown(engine)} is not an EngineOptions", next="give fs.EngineOptions(...)")

        def opened(location: object) -> Store:
            place = to_store(location)
            return LocalStore(place, engine) if isinstance(place, Path) else store_at(place, engine)

        super().__init__(
            [opened(path) for path in paths], weights, opened=opened, watch=(engine or EngineOptions()).watch
        )


__all__ = ["Striped"]
