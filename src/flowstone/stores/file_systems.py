"""`fs.Fsspec`: a store in a directory of any file system that fsspec knows."""

from __future__ import annotations

from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError
from flowstone.store.objects.file_system import FileSystemBucket
from flowstone.store.objects.store import ObjectStore
from flowstone.stores.arguments import shown


class Fsspec(ObjectStore):
    """A store in a directory of an fsspec file system, such as SFTP: slower than a local directory or a bucket.

    file_system  an instance: fsspec.filesystem("sftp", host=...). Its credentials and its own retries are used
    path         path of the directory in that file system
    engine       I/O options (EngineOptions)

    If no further settings are needed, a URL does the same: "fsspec+sftp://user@host/path". docs/ORDERING.md, File
    systems of fsspec, says which guarantees such a store lacks. For S3, GCS and Azure, URLs such as "s3://bucket/path"
    are faster and safer.

    raises  ArgumentError  an argument has another type, or the file system caches what it has read
    """

    def __init__(self, file_system: object, path: str, *, engine: EngineOptions | None = None) -> None:
        if not isinstance(path, str) or not path.strip("/ "):
            raise ArgumentError(
                f"{shown(path)} is not the path of a directory below the root", next="give a str, such as 'runs/gpt'"
            )
        if not isinstance(engine, EngineOptions | None):
            raise ArgumentError(f"engine {shown(engine)} is not an EngineOptions", next="give fs.EngineOptions(...)")
        bucket = FileSystemBucket(file_system, path)
        protocol = getattr(file_system, "protocol", "")
        scheme = protocol if isinstance(protocol, str) else protocol[0]
        super().__init__(bucket, engine, location=f"fsspec+{scheme}://{bucket.root}")


__all__ = ["Fsspec"]
