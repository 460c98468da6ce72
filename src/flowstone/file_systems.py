"""`fs.Fsspec`: a store in a directory of any file system that fsspec knows."""

from __future__ import annotations

from flowstone.arguments import shown
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError
from flowstone.store.objects.file_system import FileSystemBucket
from flowstone.store.objects.store import ObjectStore


class Fsspec(ObjectStore):
    """A store in a directory of a file system of fsspec's, such as one of SFTP: slower than a directory or a bucket.

    file_system  an instance: fsspec.filesystem("sftp", host=...). Its credentials, and its own repetitions, are used
    path         of the directory, as that file system writes it
    engine       how bytes move

    A URL says the same where no more is needed: "fsspec+sftp://user@host/path". What such a store promises less is in
    docs/ORDERING.md, File systems of fsspec; S3, GCS and Azure have a faster and safer way by their own URLs.

    raises  ArgumentError  something else is given; a file system that keeps copies of what it has read
    """

    def __init__(self, file_system: object, path: str, *, engine: EngineOptions | None = None) -> None:
        if not isinstance(path, str) or not path.strip("/ "):
            raise ArgumentError(f"{shown(path)} is no path of a directory", next="give a str, below the root")
        if not isinstance(engine, EngineOptions | None):
            raise ArgumentError(f"engine {shown(engine)} is not an EngineOptions", next="give fs.EngineOptions(...)")
        bucket = FileSystemBucket(file_system, path)
        protocol = getattr(file_system, "protocol", "")
        scheme = protocol if isinstance(protocol, str) else protocol[0]
        super().__init__(bucket, engine, location=f"fsspec+{scheme}://{bucket.root}")


__all__ = ["Fsspec"]
