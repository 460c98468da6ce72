"""An fsspec file system with the interface of an obstore object store: slower, and with weaker guarantees.

fsspec has no conditional put. On S3 (s3fs), an object appears complete, and is created only if its name is free. On all
other file systems, a temporary file in the same directory is written. It is renamed after a check that the new name is
free. So readers see a complete file or none, but only the store's lock prevents that two writers use the same name
(docs/ORDERING.md, File systems of fsspec).
"""

from __future__ import annotations

import errno
import hashlib
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar, cast

import msgspec

from flowstone.config import MIB
from flowstone.errors import ArgumentError, FrameworkError, StorageError
from flowstone.store.objects.client import DIRECTORY_NAME, same_tag
from flowstone.store.urls import FSSPEC, check_parts, without_secrets

T = TypeVar("T")
_Bytes = bytes  # used in annotations of a class that has a method `bytes`

_PART_PREFIX = ".flowstone-part-"  # the names of temporary files begin with this
_PART_BYTES_MIN, _WRITE_BYTES = 8 * MIB, MIB
# here a file appears complete, and `create` is one request, which is refused if the name exists
_APPEARS_WHOLE = frozenset({"s3", "s3a"})
_OF_THREADS = frozenset({"file", "local"})  # file systems that can be called on any thread; asynchronous ones can, too
_CACHES = frozenset({"blockcache", "filecache", "simplecache", "cached"})
_MARKS = (  # entries of fsspec's info() that differ between a file and the file that replaces it
    "ETag", "etag", "e_tag", "generation", "VersionId", "version_id", "md5Hash", "content_md5", "ino", "LastModified",
    "last_modified", "mtime", "updated", "modified", "created",
)
# the other entries are times, which may be rounded to seconds
_SURE_MARKS = frozenset(_MARKS[: _MARKS.index("LastModified")])
# if only times are available, files up to this size are read to compute a tag from their bytes
_READ_FOR_TAG_MAX = 64 * 1024


def open_file_system(url: str) -> tuple[object, str, str]:
    """Open the file system of a URL. Returns it, the path in it, and the URL without secrets. fsspec may connect to a
    server.

    raises  FrameworkError  fsspec, or a package that it needs for this scheme, is not installed
            ArgumentError   fsspec does not know the scheme
            StorageError    the connection fails
    """
    inner, name = url.removeprefix(FSSPEC), without_secrets(url).rstrip("/")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise FrameworkError(
            f"cannot open {name}: fsspec is not installed", next="pip install 'flowstone[fsspec]'"
        ) from error
    try:
        # A separate instance, since cached listings and transactions belong to the instance.
        file_system, path = url_to_fs(inner, skip_instance_cache=True)
    except ImportError as error:
        raise FrameworkError(
            f"cannot open {name}: {error}", next="install the package that fsspec names"
        ) from error
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"fsspec cannot open the URL {name}: {str(error).partition(chr(10))[0]}",
            next="write fsspec+sftp://user@host/path, or any other scheme that fsspec knows",
        ) from error
    except Exception as error:  # libraries of the file system may raise any error
        code = error.errno if isinstance(error, OSError) and error.errno else errno.EHOSTUNREACH
        raise StorageError(
            f"cannot connect to {name}", errno=code, reason=f"{type(error).__name__}: {error!s:.300}",
            next="check host, port and credentials, as for any other program that uses fsspec",
        ) from error
    return file_system, str(path), name


class FileSystemBucket:
    """Offers the methods of obstore's ObjectStore that store/objects/ calls, and implements them with an fsspec file
    system.

    file_system  an instance of fsspec's
    root         the directory to which all paths are relative, written as a path of that file system

    raises  ArgumentError  `file_system` is not an fsspec file system, or caches bytes of files
    """

    def __init__(self, file_system: object, root: str) -> None:
        protocols = _protocols_of(file_system)
        if any(mark in root for mark in "*?["):
            raise ArgumentError(
                f"the path {root!r} contains * ? or [, which fsspec takes as a pattern", next="choose another directory"
            )
        self._fs: Any = cast("Any", file_system)
        self._root = str(self._fs._strip_protocol(root)).rstrip("/")
        check_parts(self._root, self._root.lstrip("/").split("/") if self._root else ())
        self._appears_whole = bool(protocols & _APPEARS_WHOLE)
        has_own_threads = getattr(file_system, "async_impl", False) or bool(protocols & _OF_THREADS)
        self._guard: AbstractContextManager[object] = nullcontext() if has_own_threads else threading.RLock()

    @property
    def root(self) -> str:
        return self._root

    # Reading

    def head(self, path: str) -> dict[str, Any]:
        meta = self._stat(path)
        if meta is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return meta

    def get(self, path: str, *, options: Mapping[str, Any] | None = None) -> _GetResult:
        meta = self.head(path)
        range_ = (options or {}).get("range", (0, meta["size"]))
        begin, end = (range_["offset"], meta["size"]) if isinstance(range_, dict) else range_
        return _GetResult(meta, lambda start, stop: self.get_range(path, start=start, length=stop - start), begin, end)

    def get_range(self, path: str, *, start: int, length: int) -> bytes:
        full_path = self._full_path(path)
        try:
            return bytes(self._call(lambda: self._range(full_path, start, start + length)))
        except FileNotFoundError:
            raise
        except OSError:
            if start < self.head(path)["size"]:
                raise
            return b""  # some file systems refuse a range that begins after the end

    def _range(self, full_path: str, begin: int, end: int) -> bytes:
        if not _is_generic(self._fs, "cat_file"):
            return bytes(self._fs.cat_file(full_path, start=begin, end=end))
        with self._fs.open(full_path, "rb") as file:
            if hasattr(file, "readv"):  # files of paramiko: `read` would wait for the answer to each 32 KiB
                end = min(end, int(self._fs.info(full_path)["size"]))
                return b"".join(file.readv([(begin, end - begin)])) if begin < end else b""
            file.seek(begin)
            return bytes(file.read(end - begin))

    def list_with_delimiter(self, prefix: str | None) -> dict[str, Any]:
        files, directories = self._entries(prefix or "")
        whole = [{"path": name} for name in files if not name.rpartition("/")[2].startswith(_PART_PREFIX)]
        return {"objects": whole, "common_prefixes": directories}

    def _entries(self, path: str) -> tuple[list[str], list[str]]:
        """Returns the names of files, including temporary ones, and of directories."""
        full_path = self._full_path(path)
        try:
            entries = self._call(lambda: self._fs.ls(full_path, detail=True), full_path)
        except (FileNotFoundError, NotADirectoryError):
            entries = []
        names: dict[str, list[str]] = {"directory": [], "file": []}
        for entry in entries:
            name = str(entry["name"]).strip("/")
            if name != full_path.strip("/"):  # some file systems list a file, or a directory, as an entry of itself
                names["directory" if entry["type"] == "directory" else "file"].append(name)
        return names["file"], names["directory"]

    # Writing

    def put(
        self, path: str, data: bytes | Iterable[bytes], *, mode: object = "overwrite", use_multipart: bool = False,
        attributes: object = None, chunk_size: int = 0, max_concurrency: int = 1,
    ) -> dict[str, Any]:
        """Write a file. `mode` is "create", "overwrite", or {"e_tag": the tag of the file to replace}. Raises
        FileExistsError if the file exists ("create"), or has another tag.
        """
        del use_multipart, attributes, max_concurrency  # the file system decides itself what these options say
        if getattr(self._fs, "_intrans", False):
            raise OSError(errno.EBUSY, "an fsspec transaction is open, and delays all writes until it ends", path)
        existing = self._stat(path)
        if isinstance(mode, dict):
            if existing is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            if not same_tag(existing["e_tag"], mode["e_tag"]):
                raise FileExistsError(errno.EEXIST, "the file was replaced by another one", path)
        elif mode == "create" and existing is not None:
            raise FileExistsError(errno.EEXIST, "the file exists", path)
        full_path = self._full_path(path)
        if not self._appears_whole:
            self._put_moved(path, data, chunk_size, existing)
        elif isinstance(data, bytes):
            write_mode = "create" if mode == "create" else "overwrite"
            self._call(lambda: self._fs.pipe_file(full_path, data, mode=write_mode), full_path)
        else:
            self._send(full_path, data, chunk_size, autocommit=False)
        if isinstance(data, bytes) and mode != "overwrite" and self.get(path).bytes() != data:
            raise FileExistsError(errno.EEXIST, "another writer has replaced the file at the same time", path)
        return {"e_tag": self.head(path)["e_tag"]}

    def delete(self, path: str) -> None:
        full_path = self._full_path(path)
        self._call(lambda: self._fs.rm_file(full_path), full_path)
        directory, _, name = path.rpartition("/")
        if name == DIRECTORY_NAME and directory and not self._appears_whole:
            self._remove_directory(directory)

    def copy(self, source: str, target: str) -> None:
        self._call(lambda: self._fs.cp_file(self._full_path(source), self._full_path(target)), self._full_path(target))

    def _remove_directory(self, directory: str) -> None:
        """Remove a directory that has only temporary files of killed writers, if the file system has real directories.
        First checks that the directory has no other files, since rmdir of some file systems removes all entries.
        """
        full_path = self._full_path(directory)
        with suppress(OSError):  # an empty directory that stays is listed, but is not a checkpoint
            for name in (entry.rpartition("/")[2] for entry in self._entries(directory)[0]):
                if name.startswith(_PART_PREFIX):
                    self._call(lambda name=name: self._fs.rm_file(f"{full_path}/{name}"), full_path)  # type: ignore[misc]
            if self._entries(directory) == ([], []):
                self._call(lambda: self._fs.rmdir(full_path), full_path)

    def _put_moved(
        self, path: str, data: bytes | Iterable[bytes], chunk_bytes: int, replaced: Mapping[str, Any] | None
    ) -> None:
        part = f"{self._full_path(path).rpartition('/')[0]}/{_PART_PREFIX}{secrets.token_hex(8)}"
        try:
            sent = self._send(part, [data] if isinstance(data, bytes) else data, chunk_bytes)
            self._move(part, path, sent, replaced)
        except BaseException:
            with suppress(Exception):  # the file is removed with its directory later; the first error is raised
                self._call(lambda: self._fs.rm_file(part), part)
            raise

    def _move(self, part: str, path: str, sent: int, replaced: Mapping[str, Any] | None) -> None:
        full_path = self._full_path(path)

        def move() -> None:
            if _is_generic(self._fs, "mv"):  # the generic `mv` of fsspec is for patterns and directories
                self._fs.cp_file(part, full_path)
                self._fs.rm_file(part)
            else:
                self._fs.mv(part, full_path)

        try:
            self._call(move, full_path)
        except OSError:
            # The rename may have succeeded although its answer was lost. In that case only the target exists.
            left, current = self._info(part), self._stat(path)
            is_new = current is not None and (replaced is None or current["e_tag"] != replaced["e_tag"])
            if left is None and current is not None and is_new and current["size"] == sent:
                return
            if left is None or left["size"] != sent or replaced is None or current is None:
                raise
            # some file systems rename a file only to a name that does not exist
            self._call(lambda: self._fs.rm_file(full_path), full_path)
            self._call(move, full_path)

    def _send(self, full_path: str, pieces: Iterable[bytes], chunk_bytes: int, **how: bool) -> int:
        """Write a new file. Returns its size in bytes. After an error on S3 the open file is discarded, since closing
        it would complete the file.
        """
        length, sent = max(chunk_bytes, _PART_BYTES_MIN), 0
        file = self._call(lambda: self._opened(full_path, length, how), full_path)
        try:
            for piece in pieces:
                # in small writes, so that the lease can be renewed in between
                for start in range(0, len(piece), _WRITE_BYTES):
                    part = piece[start : start + _WRITE_BYTES]
                    self._call(lambda part=part: _write(file, part))  # type: ignore[misc]
                sent += len(piece)
            self._call(file.close)
            if how:
                self._call(file.commit)
            self._check_sent(full_path, sent)
        except BaseException:
            # the rest of the file is removed with its directory later; the first error is raised
            with suppress(Exception):
                self._call(file.discard if how else file.close)
                file.closed = True  # otherwise the garbage collector would close, and so complete, the file
            raise
        finally:
            self._fs.invalidate_cache(full_path)
        return sent

    def _check_sent(self, full_path: str, sent: int) -> None:
        """Raise OSError if the written file is too short, since some file systems report a failed write late, or never.
        """
        info = self._info(full_path)
        size = 0 if info is None else info["size"]
        if size != sent:
            raise OSError(errno.EIO, f"after the write, the file has {size} bytes instead of {sent}", full_path)

    def _opened(self, full_path: str, length: int, how: Mapping[str, bool]) -> Any:
        if self._appears_whole:
            return self._fs.open(full_path, "wb", block_size=length, **how)
        try:
            return self._fs.open(full_path, "wb")
        except FileNotFoundError:
            self._fs.makedirs(full_path.rpartition("/")[0], exist_ok=True)
            return self._fs.open(full_path, "wb")

    # Common

    def _full_path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root or "/"

    def _stat(self, path: str) -> dict[str, Any] | None:
        info = self._info(self._full_path(path))
        if info is None:
            return None
        size = int(info["size"] or 0)
        marks = [f"{name}={info[name]}" for name in _MARKS if info.get(name) is not None]
        if not any(info.get(name) is not None for name in _SURE_MARKS) and size <= _READ_FOR_TAG_MAX:
            full_path = self._full_path(path)
            try:
                marks.append(hashlib.blake2b(self._call(lambda: self._fs.cat_file(full_path))).hexdigest())
            except FileNotFoundError:
                return None
        tag = hashlib.blake2b(repr((size, marks)).encode(), digest_size=16).hexdigest()
        return {"e_tag": tag, "size": size, "last_modified": None, "version": None, "path": path}

    def _info(self, full_path: str) -> Mapping[str, Any] | None:
        try:
            info: Mapping[str, Any] = self._call(lambda: self._fs.info(full_path), full_path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if info["type"] == "directory" else info

    def _call(self, act: Callable[[], T], full_path: str | None = None) -> T:
        """Call `act`, which reads or changes `full_path`, and return its result. Cached listings of the path are
        dropped first.
        """
        try:
            with self._guard:
                if full_path is not None:
                    self._fs.invalidate_cache(full_path)
                    self._fs.invalidate_cache(full_path.rpartition("/")[0])
                return act()
        except NotImplementedError as error:
            kind = type(self._fs).__name__
            message = f"fsspec's {kind} does not implement an operation that Flowstone needs: {error}".rstrip(": ")
            raise OSError(errno.ENOTSUP, message) from error


class _GetResult(msgspec.Struct, frozen=True):
    """A file that is being read, with the interface of obstore's GetResult."""

    meta: Mapping[str, Any]
    read: Callable[[int, int], _Bytes]
    begin: int
    end: int

    @property
    def attributes(self) -> Mapping[str, object]:
        return {}

    def bytes(self) -> _Bytes:
        return self.read(self.begin, self.end) if self.end > self.begin else b""

    def stream(self, chunk_bytes: int) -> Iterator[_Bytes]:
        for begin in range(self.begin, self.end, chunk_bytes):
            yield self.read(begin, min(self.end, begin + chunk_bytes))


def _write(file: Any, data: bytes) -> None:
    """Write `data` to an open file, and wait for all answers of the server."""
    if not hasattr(file, "set_pipelined"):
        file.write(data)
        return
    # Files of paramiko: without pipelining, each 32 KiB waits for its answer. With an outstanding answer, a later call
    # of another kind would wait forever. So the last byte is written without pipelining, which waits for all answers.
    file.set_pipelined(True)
    file.write(data[:-1])
    file.set_pipelined(False)
    file.write(data[-1:])


def _is_generic(file_system: object, verb: str) -> bool:
    """Whether a file system has only the generic implementation of fsspec for a method."""
    return str(getattr(type(file_system), verb).__qualname__).startswith("AbstractFileSystem.")


def _protocols_of(file_system: object) -> frozenset[str]:
    protocol, missing = getattr(file_system, "protocol", None), [
        name for name in ("cat_file", "info", "ls", "open", "rm_file") if not callable(getattr(file_system, name, None))
    ]
    if missing or protocol is None:
        raise ArgumentError(
            f"{type(file_system).__name__} is not an fsspec file system",
            missing=", ".join([*missing] or ["protocol"]),
            next="give a file system, such as fsspec.filesystem('sftp', host=...)",
        )
    protocols = frozenset([protocol] if isinstance(protocol, str) else protocol)
    if protocols & _CACHES:
        raise ArgumentError(
            f"{type(file_system).__name__} caches what it has read, and would miss another job's commits",
            next="give the underlying file system",
        )
    return protocols


__all__ = ["FileSystemBucket", "open_file_system"]
