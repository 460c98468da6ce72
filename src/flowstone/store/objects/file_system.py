"""A file system of fsspec's, called as an object store of obstore's is: slower, and with weaker promises.

fsspec has no put under a condition. On S3 (s3fs) an object appears whole under its name, and is created only where
there is none. Everywhere else bytes go into a temporary file beside the name, which is then moved there; whether the
name is free is asked before. So readers see all of a file or nothing, and two writers are kept apart by the lock alone
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
from flowstone.store.objects.urls import FSSPEC, check_parts, without_secrets

T = TypeVar("T")
_Bytes = bytes  # in a class that has a method of that name

_PART_PREFIX = ".flowstone-part-"  # of a temporary file's name
_PART_BYTES_MIN, _WRITE_BYTES = 8 * MIB, MIB
_APPEARS_WHOLE = frozenset({"s3", "s3a"})  # and `create` is one request that is refused where the name is taken
_OF_THREADS = frozenset({"file", "local"})  # any thread may call, as on those whose calls are coroutines
_CACHES = frozenset({"blockcache", "filecache", "simplecache", "cached"})
_MARKS = (  # what file systems call that which tells a file from the one that it has replaced
    "ETag", "etag", "e_tag", "generation", "VersionId", "version_id", "md5Hash", "content_md5", "ino", "LastModified",
    "last_modified", "mtime", "updated", "modified", "created",
)
_SURE_MARKS = frozenset(_MARKS[: _MARKS.index("LastModified")])  # the others are times, of a second perhaps
_READ_FOR_TAG_MAX = 64 * 1024  # bytes of a file that is read where there are times alone


def open_file_system(url: str) -> tuple[object, str, str]:
    """The file system and the path that a URL names, and how it is called. May connect, as fsspec does.

    raises  FrameworkError  fsspec, or what it needs for this scheme, is not installed
            ArgumentError   fsspec knows no such scheme
            StorageError    it does not connect
    """
    inner, name = url.removeprefix(FSSPEC), without_secrets(url).rstrip("/")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise FrameworkError(
            f"cannot open {name}: fsspec is not installed", next="pip install 'flowstone[fsspec]'"
        ) from error
    try:
        # An instance of our own: another user's listings, and transactions, are not ours.
        file_system, path = url_to_fs(inner, skip_instance_cache=True)
    except ImportError as error:
        raise FrameworkError(
            f"cannot open {name}: {error}", next="install the package that fsspec names"
        ) from error
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"{name} is no URL that fsspec can open: {str(error).partition(chr(10))[0]}",
            next="write fsspec+sftp://user@host/path, or any other scheme that fsspec knows",
        ) from error
    except Exception as error:  # of what the file system uses: this module knows none of it
        code = error.errno if isinstance(error, OSError) and error.errno else errno.EHOSTUNREACH
        raise StorageError(
            f"cannot connect to {name}", errno=code, reason=f"{type(error).__name__}: {error!s:.300}",
            next="check host, port and credentials, as for any other program that uses fsspec",
        ) from error
    return file_system, str(path), name


class FileSystemBucket:
    """See obstore's ObjectStore: as much of it as store/objects/ calls.

    file_system  of fsspec's
    root         the directory that paths are in, as that file system writes it

    raises  ArgumentError  something else is given, or a file system that keeps copies of what it has read
    """

    def __init__(self, file_system: object, root: str) -> None:
        protocols = _protocols_of(file_system)
        if any(mark in root for mark in "*?["):
            raise ArgumentError(
                f"the path {root!r} has one of * ? [, which fsspec takes for a pattern", next="choose another directory"
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

    # What reads

    def head(self, path: str) -> dict[str, Any]:
        found = self._look(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return found

    def get(self, path: str, *, options: Mapping[str, Any] | None = None) -> _Found:
        meta = self.head(path)
        wanted = (options or {}).get("range", (0, meta["size"]))
        begin, end = (wanted["offset"], meta["size"]) if isinstance(wanted, dict) else wanted
        return _Found(meta, lambda at, to: self.get_range(path, start=at, length=to - at), begin, end)

    def get_range(self, path: str, *, start: int, length: int) -> bytes:
        place = self._place(path)
        try:
            return bytes(self._ask(lambda: self._range(place, start, start + length)))
        except FileNotFoundError:
            raise
        except OSError:
            if start < self.head(path)["size"]:
                raise
            return b""  # some refuse a range that begins behind the end

    def _range(self, place: str, begin: int, end: int) -> bytes:
        if not _is_generic(self._fs, "cat_file"):
            return bytes(self._fs.cat_file(place, start=begin, end=end))
        with self._fs.open(place, "rb") as file:
            if hasattr(file, "readv"):  # paramiko's: else each 32 KiB waits for its answer
                end = min(end, int(self._fs.info(place)["size"]))
                return b"".join(file.readv([(begin, end - begin)])) if begin < end else b""
            file.seek(begin)
            return bytes(file.read(end - begin))

    def list_with_delimiter(self, prefix: str | None) -> dict[str, Any]:
        files, directories = self._entries(prefix or "")
        whole = [{"path": name} for name in files if not name.rpartition("/")[2].startswith(_PART_PREFIX)]
        return {"objects": whole, "common_prefixes": directories}

    def _entries(self, path: str) -> tuple[list[str], list[str]]:
        """Files, those included that are not whole yet, and directories."""
        place = self._place(path)
        try:
            entries = self._ask(lambda: self._fs.ls(place, detail=True), place)
        except (FileNotFoundError, NotADirectoryError):
            entries = []
        names: dict[str, list[str]] = {"directory": [], "file": []}
        for entry in entries:
            name = str(entry["name"]).strip("/")
            if name != place.strip("/"):  # some list a file, or a directory, as what is in it
                names["directory" if entry["type"] == "directory" else "file"].append(name)
        return names["file"], names["directory"]

    # What writes

    def put(
        self, path: str, data: bytes | Iterable[bytes], *, mode: object = "overwrite", use_multipart: bool = False,
        attributes: object = None, chunk_size: int = 0, max_concurrency: int = 1,
    ) -> dict[str, Any]:
        """`mode`: "create", "overwrite", or {"e_tag": the tag of what is replaced}. FileExistsError where that is not
        what is there.
        """
        del use_multipart, attributes, max_concurrency  # it has its own ways of these
        if getattr(self._fs, "_intrans", False):
            raise OSError(errno.EBUSY, "a transaction of fsspec's is open: nothing is written before it ends", path)
        found = self._look(path)
        if isinstance(mode, dict):
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            if not same_tag(found["e_tag"], mode["e_tag"]):
                raise FileExistsError(errno.EEXIST, "another file is there", path)
        elif mode == "create" and found is not None:
            raise FileExistsError(errno.EEXIST, "the name is taken", path)
        place = self._place(path)
        if not self._appears_whole:
            self._put_moved(path, data, chunk_size, found)
        elif isinstance(data, bytes):
            how = "create" if mode == "create" else "overwrite"
            self._ask(lambda: self._fs.pipe_file(place, data, mode=how), place)
        else:
            self._send(place, data, chunk_size, autocommit=False)
        if isinstance(data, bytes) and mode != "overwrite" and self.get(path).bytes() != data:
            raise FileExistsError(errno.EEXIST, "another writer has replaced it at once", path)
        return {"e_tag": self.head(path)["e_tag"]}

    def delete(self, path: str) -> None:
        place = self._place(path)
        self._ask(lambda: self._fs.rm_file(place), place)
        directory, _, name = path.rpartition("/")
        if name == DIRECTORY_NAME and directory and not self._appears_whole:
            self._remove_directory(directory)

    def copy(self, source: str, target: str) -> None:
        self._ask(lambda: self._fs.cp_file(self._place(source), self._place(target)), self._place(target))

    def _remove_directory(self, directory: str) -> None:
        """Where directories are more than prefixes. Only an empty one, but for what a killed writer has left: some
        remove all that is inside.
        """
        place = self._place(directory)
        with suppress(OSError):  # safe: an empty directory is listed, and is no checkpoint
            for name in (one.rpartition("/")[2] for one in self._entries(directory)[0]):
                if name.startswith(_PART_PREFIX):
                    self._ask(lambda name=name: self._fs.rm_file(f"{place}/{name}"), place)  # type: ignore[misc]
            if self._entries(directory) == ([], []):
                self._ask(lambda: self._fs.rmdir(place), place)

    def _put_moved(
        self, path: str, data: bytes | Iterable[bytes], chunk_bytes: int, replaced: Mapping[str, Any] | None
    ) -> None:
        part = f"{self._place(path).rpartition('/')[0]}/{_PART_PREFIX}{secrets.token_hex(8)}"
        try:
            sent = self._send(part, [data] if isinstance(data, bytes) else data, chunk_bytes)
            self._move(part, path, sent, replaced)
        except BaseException:
            with suppress(Exception):  # safe: it is swept with the draft; the reason is on its way
                self._ask(lambda: self._fs.rm_file(part), part)
            raise

    def _move(self, part: str, path: str, sent: int, replaced: Mapping[str, Any] | None) -> None:
        place = self._place(path)

        def move() -> None:
            if _is_generic(self._fs, "mv"):  # by patterns, and for directories
                self._fs.cp_file(part, place)
                self._fs.rm_file(part)
            else:
                self._fs.mv(part, place)

        try:
            self._ask(move, place)
        except OSError:
            # It may have been done, and its answer lost: then what is there is all that there is of the new file.
            left, there = self._look_at(part), self._look(path)
            is_new = there is not None and (replaced is None or there["e_tag"] != replaced["e_tag"])
            if left is None and there is not None and is_new and there["size"] == sent:
                return
            if left is None or left["size"] != sent or replaced is None or there is None:
                raise
            self._ask(lambda: self._fs.rm_file(place), place)  # some move to free names alone
            self._ask(move, place)

    def _send(self, place: str, pieces: Iterable[bytes], chunk_bytes: int, **how: bool) -> int:
        """Write a new file; its bytes. One that does not come to its end is given up: to close it would complete it."""
        length, sent = max(chunk_bytes, _PART_BYTES_MIN), 0
        file = self._ask(lambda: self._opened(place, length, how), place)
        try:
            for piece in pieces:
                for at in range(0, len(piece), _WRITE_BYTES):  # between them the lease can be renewed
                    part = piece[at : at + _WRITE_BYTES]
                    self._ask(lambda part=part: _write(file, part))  # type: ignore[misc]
                sent += len(piece)
            self._ask(file.close)
            if how:
                self._ask(file.commit)
            self._check_sent(place, sent)
        except BaseException:
            with suppress(Exception):  # safe: what is left of it is swept with the draft; the reason is on its way
                self._ask(file.discard if how else file.close)
                file.closed = True  # else it is completed when it is collected
            raise
        finally:
            self._fs.invalidate_cache(place)
        return sent

    def _check_sent(self, place: str, sent: int) -> None:
        """Some tell late, or not at all, that a write has failed."""
        found = self._look_at(place)
        there = 0 if found is None else found["size"]
        if there != sent:
            raise OSError(errno.EIO, f"it has {there} of {sent} bytes after all were written", place)

    def _opened(self, place: str, length: int, how: Mapping[str, bool]) -> Any:
        if self._appears_whole:
            return self._fs.open(place, "wb", block_size=length, **how)
        try:
            return self._fs.open(place, "wb")
        except FileNotFoundError:
            self._fs.makedirs(place.rpartition("/")[0], exist_ok=True)
            return self._fs.open(place, "wb")

    # What both need

    def _place(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root or "/"

    def _look(self, path: str) -> dict[str, Any] | None:
        found = self._look_at(self._place(path))
        if found is None:
            return None
        size = int(found["size"] or 0)
        marks = [f"{name}={found[name]}" for name in _MARKS if found.get(name) is not None]
        if not any(found.get(name) is not None for name in _SURE_MARKS) and size <= _READ_FOR_TAG_MAX:
            place = self._place(path)
            try:
                marks.append(hashlib.blake2b(self._ask(lambda: self._fs.cat_file(place))).hexdigest())
            except FileNotFoundError:
                return None
        tag = hashlib.blake2b(repr((size, marks)).encode(), digest_size=16).hexdigest()
        return {"e_tag": tag, "size": size, "last_modified": None, "version": None, "path": path}

    def _look_at(self, place: str) -> Mapping[str, Any] | None:
        try:
            found: Mapping[str, Any] = self._ask(lambda: self._fs.info(place), place)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if found["type"] == "directory" else found

    def _ask(self, act: Callable[[], T], place: str | None = None) -> T:
        """The result of a call. `place`: what it asks about, or changes: listings that are kept are not believed."""
        try:
            with self._guard:
                if place is not None:
                    self._fs.invalidate_cache(place)
                    self._fs.invalidate_cache(place.rpartition("/")[0])
                return act()
        except NotImplementedError as error:
            kind = type(self._fs).__name__
            raise OSError(errno.ENOTSUP, f"fsspec's {kind} cannot do that: {error}".rstrip(": ")) from error


class _Found(msgspec.Struct, frozen=True):
    """A file that is there: obstore's GetResult."""

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
    """Write, with all answers on return."""
    if not hasattr(file, "set_pipelined"):
        file.write(data)
        return
    # paramiko's: else each 32 KiB waits for its answer. An answer that is still to come would be taken by the next call
    # for anything else, and waited for ever after: so the last byte waits for all.
    file.set_pipelined(True)
    file.write(data[:-1])
    file.set_pipelined(False)
    file.write(data[-1:])


def _is_generic(file_system: object, verb: str) -> bool:
    """Whether a file system has no way of its own for a call."""
    return str(getattr(type(file_system), verb).__qualname__).startswith("AbstractFileSystem.")


def _protocols_of(file_system: object) -> frozenset[str]:
    protocol, missing = getattr(file_system, "protocol", None), [
        name for name in ("cat_file", "info", "ls", "open", "rm_file") if not callable(getattr(file_system, name, None))
    ]
    if missing or protocol is None:
        raise ArgumentError(
            f"{type(file_system).__name__} is no file system of fsspec's",
            missing=", ".join([*missing] or ["protocol"]),
            next="give one: fsspec.filesystem('sftp', host=...)",
        )
    protocols = frozenset([protocol] if isinstance(protocol, str) else protocol)
    if protocols & _CACHES:
        raise ArgumentError(
            f"{type(file_system).__name__} keeps copies of what it has read: another job's commits would not be seen",
            next="give the file system beneath it",
        )
    return protocols


__all__ = ["FileSystemBucket", "open_file_system"]
