"""Requests to an object store: repeated within a budget where that is safe, and refused in our words.

obstore is told to try each request once: what to do about a lost answer depends on the request, which only we know.
Parts of an upload are the exception: obstore repeats each of them itself, as it has its bytes.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np

from flowstone.config import MIB
from flowstone.errors import ArgumentError, FlowstoneError, FrameworkError, StorageError
from flowstone.log import log
from flowstone.store.objects.failures import begins_behind, is_missing, is_taken, may_pass, storage_error
from flowstone.store.objects.foreign_names import ENDPOINTS, Listing, is_refused, list_all, sorted_out
from flowstone.store.objects.profiles import of_profile
from flowstone.store.objects.urls import parse

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from obstore import Bytes, GetOptions, ObjectMeta, PutMode
    from obstore.store import BackoffConfig, ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Bucket

T = TypeVar("T")

_OF_CALL = "flowstone-call"  # an attribute of small objects: S3 tells two of equal bytes apart by the second only
_PART_ATTEMPTS_MAX = 20
DIRECTORY_NAME = ".flowstone-directory"  # the object that makes a directory of a prefix
_COPY_PART_BYTES = 16 * MIB  # of a copy that goes through this machine


class Patience(msgspec.Struct, frozen=True):
    """How long a request that may be repeated is.

    budget_s       from the first attempt; after that, its failure is the result
    request_s      for one attempt, its body included
    """

    budget_s: float = 60.0
    request_s: float = 120.0
    first_delay_s: float = 0.1
    delay_s_max: float = 5.0

    def delay_s(self, attempt: int) -> float:
        """Before the attempt after number `attempt`: doubled each time, and spread, so that clients do not meet."""
        return min(self.delay_s_max, self.first_delay_s * 2.0 ** min(attempt, 30)) * (0.5 + random.random() / 2)


def bare(tag: str | None) -> str | None:
    """A tag without its quotes."""
    return tag if tag is None else tag.strip('"')


def same_tag(one: str | None, other: str | None) -> bool:
    """Whether two tags are of one object: servers give one tag with quotes here, and without them there."""
    return bare(one) == bare(other)


def open_bucket(url: str, patience: Patience) -> tuple[Bucket, Bucket]:
    """obstore's store for a URL: one that tries once, and one that repeats parts of uploads. Makes no request.

    raises  FrameworkError  obstore is missing, or what reads the AWS profile that is named
            ArgumentError   obstore knows no such URL, or the profile is of no use
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise FrameworkError(
            f"cannot open {url}: obstore is not installed", next="pip install 'flowstone[objects]'"
        ) from error
    client: ClientConfig = {"timeout": timedelta(seconds=patience.request_s), "connect_timeout": timedelta(seconds=5)}
    if any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS):
        client["allow_http"] = True  # others who read the variable take such an address without a further word
        # An answer whose head and body are two packets comes 40 ms late on a connection that has been used just before:
        # the server waits (Nagle) for what the client delays. Ceph's gateway answers so. A new connection has no such
        # wait, and without TLS costs one exchange.
        client["pool_max_idle_per_host"] = "0"
    first, most = timedelta(seconds=patience.first_delay_s), timedelta(seconds=patience.delay_s_max)
    backoff: BackoffConfig = {"init_backoff": first, "max_backoff": most, "base": 2}
    budget = timedelta(seconds=patience.budget_s)
    repeats: RetryConfig = {"max_retries": _PART_ATTEMPTS_MAX, "retry_timeout": budget, "backoff": backoff}
    no_repeats: RetryConfig = {"max_retries": 0}
    make = cast("Callable[..., Bucket]", from_url)  # each of its overloads is of one kind of store
    parts = parse(url)
    try:
        profile = of_profile(url)
        once = make(parts.quoted, client_options=client, retry_config=no_repeats, **profile)
        repeating = make(parts.quoted, client_options=client, retry_config=repeats, **profile)
    except (BaseError, ValueError) as error:
        raise ArgumentError(
            f"{url} is no URL of an object store: {str(error).partition(chr(10))[0]}",
            next="write s3://bucket/path, gs://bucket/path or az://container/path",
        ) from error
    used = {str(cast("Any", one).prefix or "") for one in (once, repeating)}
    assert used == {parts.prefix}, f"obstore takes {url} for {used}"
    return once, repeating


class Client:
    """Requests for the objects of one store. Any thread.

    once, repeating  of obstore: see `open_bucket`; the same one twice where it has no server
    """

    def __init__(self, location: str, once: Bucket, repeating: Bucket, patience: Patience) -> None:
        self.location, self.once, self.repeating, self.patience = location, once, repeating, patience
        self._has_tokens = type(once).__name__ == "S3Store"
        self.keeps_buffers = type(once).__name__ in ("MemoryStore", "FileSystemBucket")  # it may, after the call
        self._with_foreign_names: set[str] = set()  # directories that were logged already
        self._tags_are_bare = False  # the server compares tags without their quotes: see `replace`

    def try_for(self, operation: str, path: str, act: Callable[[], T]) -> T:
        """The result of a request that may be repeated, whatever became of the attempts before.

        raises  StorageError; FileNotFoundError if there is no such object
        """
        began = time.monotonic()
        attempt = 0
        while True:
            try:
                return act()
            except FlowstoneError:
                raise
            except Exception as error:
                if is_missing(error):
                    raise
                self.pause(operation, path, error, began, attempt)
                attempt += 1

    def pause(self, operation: str, path: str, error: Exception, began: float, attempt: int) -> None:
        """Wait before another attempt. Raises StorageError instead, if none can help or the budget is spent."""
        delay, spent = self.patience.delay_s(attempt), time.monotonic() - began
        if not may_pass(error):
            raise storage_error(self.location, operation, path, error) from error
        if spent + delay > self.patience.budget_s:
            raise storage_error(self.location, operation, path, error, tried_s=spent) from error
        log.debug("%s: cannot %s %s yet (%s)", self.location, operation, path, error)
        time.sleep(delay)

    def head(self, path: str) -> ObjectMeta | None:
        """What the store says of an object; None: there is none."""
        try:
            return self.try_for("look for", path, lambda: self.once.head(path))
        except FileNotFoundError:
            return None

    def tag(self, path: str) -> str | None:
        """What tells an object from every other that has had its name; None: there is none."""
        found = self.head(path)
        return None if found is None else found["e_tag"]

    def token(self, path: str) -> str:
        """What `put_new` gave the object besides its bytes; "" if nothing."""
        if not self._has_tokens:
            return ""
        found = self.try_for("look at", path, lambda: self.once.get(path, options={"head": True}).attributes)
        return str(cast("dict[str, object]", found).get(_OF_CALL, ""))

    def get(self, path: str, options: GetOptions | None = None, *, check: Callable[[int], None] | None = None) -> bytes:
        """An object's bytes; `check` is called with its size before any of them is read.

        raises  StorageError, also ENOENT
        """
        def act() -> bytes:
            found = self.once.get(path, options=options)
            if check is not None:
                check(found.meta["size"])
            return bytes(found.bytes())

        try:
            return self.try_for("read", path, act)
        except FileNotFoundError as error:
            raise storage_error(self.location, "read", path, error) from error

    def find(self, path: str) -> tuple[bytes, str | None] | None:
        """An object's bytes, and the tag that it had with them; None: there is none."""
        def act() -> tuple[bytes, str | None]:
            found = self.once.get(path)
            return bytes(found.bytes()), found.meta["e_tag"]

        try:
            return self.try_for("read", path, act)
        except FileNotFoundError:
            return None

    def entries(self, path: str) -> Listing:
        """Names in a directory. Foreign names are logged, once for each directory."""
        refused: StorageError | None = None
        if path not in self._with_foreign_names:
            try:
                found = self.try_for("list", path, lambda: self.once.list_with_delimiter(path or None))
            except StorageError as error:
                if not is_refused(error.__cause__):
                    raise
                refused = error
            else:
                return sorted_out(path, found)
        listing = self.try_for("list", path, lambda: list_all(self.location, self.once, path, refused))
        if listing.foreign and path not in self._with_foreign_names:
            self._with_foreign_names.add(path)
            log.warning(
                "objects in %s are skipped, as no file of Flowstone has such a name: %s",
                f"{self.location}/{path}".rstrip("/"), ", ".join(listing.foreign[:5]),
            )
        return listing

    def put_new(self, path: str, data: bytes, token: str) -> str | None:
        """Write an object under a name that is free: all of it or nothing. Returns its tag.

        An attempt whose answer is lost may have succeeded. So once one was lost, an object with exactly these bytes and
        this token is ours. `token`: another one for each call.

        raises  StorageError, EEXIST where the name is taken
        """
        attributes = {_OF_CALL: token} if self._has_tokens else None
        began, attempt, is_lost = time.monotonic(), 0, False
        while True:
            try:
                return self.once.put(path, data, mode="create", use_multipart=False, attributes=attributes)["e_tag"]
            except Exception as error:
                if is_taken(error):
                    if is_lost and self.is_ours(path, data, token):
                        return self.tag(path)
                    raise storage_error(self.location, "write", path, error) from error
                try:
                    self.pause("write", path, error, began, attempt)
                except StorageError as refusal:
                    if not may_pass(error):
                        raise
                    if self.is_ours(path, data, token):
                        return None
                    spent = time.monotonic() - began
                    raise storage_error(
                        self.location, "write", path, error, tried_s=spent,
                        outcome="unknown: the object may be there yet",
                    ) from refusal
                is_lost, attempt = True, attempt + 1

    def is_ours(self, path: str, data: bytes, token: str) -> bool:
        """Whether the object is what `put_new` has written with that token. False also if that cannot be found out."""
        try:
            return self.get(path) == data and self.token(path) in ("", token)
        except (StorageError, FileNotFoundError):
            return False

    def replace(self, path: str, data: bytes, tag: str | None) -> str | None:
        """Write an object in the place of the one with that tag. Returns its own; None: another one is there.

        Ceph's gateway up to version 16 takes the quotes of If-Match for a part of the tag, and refuses its own. Once
        one has done so with the tag that the object has, it is given tags without them.

        raises  StorageError
        """
        began, attempt, is_lost = time.monotonic(), 0, False
        while True:
            given = bare(tag) if self._tags_are_bare else tag
            try:
                mode = cast("PutMode", {"e_tag": given})
                return self.once.put(path, data, mode=mode, use_multipart=False)["e_tag"]
            except FileNotFoundError:
                return None
            except Exception as error:
                if is_taken(error):
                    found = self.head(path)
                    if found is None or (is_lost and self.is_ours(path, data, "")):
                        return None if found is None else found["e_tag"]
                    if given != bare(tag) and same_tag(found["e_tag"], tag):
                        self._tags_are_bare = True
                        continue
                    return None
                self.pause("write", path, error, began, attempt)
                is_lost, attempt = True, attempt + 1

    def check_conditional(self, path: str, data: bytes) -> None:
        """Raise StorageError if the store does not refuse a conditional put to a name that is taken, by these bytes."""
        def act() -> bool:
            try:
                self.once.put(path, data, mode="create", use_multipart=False)
            except Exception as error:
                if is_taken(error):
                    return True
                raise
            return False

        if not self.try_for("write", path, act):
            raise StorageError(
                f"{self.location} cannot commit a checkpoint", errno=errno.ENOTSUP,
                reason="the store ignores If-None-Match: of two jobs that commit one step, neither would be refused",
                next="use a store that puts conditionally (If-None-Match, If-Match)",
            )

    def delete(self, path: str) -> None:
        """Remove an object; nothing happens where there is none."""
        try:
            self.try_for("remove", path, lambda: self.once.delete(path))
        except FileNotFoundError:
            return

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store; by way of this machine where the store refuses one of that size."""
        try:
            self.try_for("copy", source, lambda: self.once.copy(source, target))
        except FileNotFoundError as error:
            raise storage_error(self.location, "rename", source, error) from error
        except StorageError as error:
            found = self.head(source)
            if error.errno == errno.EACCES or found is None:
                raise
            self.try_for("copy", source, lambda: self.repeating.put(
                target, self.once.get(source).stream(_COPY_PART_BYTES), use_multipart=True,
                chunk_size=max(_COPY_PART_BYTES, found["size"] // 9_000),
            ))

    def read_range(self, path: str, offset: int, length: int) -> NDArray[np.uint8]:
        """The bytes of a range of an object, in obstore's memory: as many as the object has there.

        raises  StorageError, also ENOENT
        """
        def act() -> Bytes | bytes:
            try:
                return self.once.get_range(path, start=offset, length=length)
            except Exception as error:
                if begins_behind(error):
                    return b""
                raise

        try:
            return np.frombuffer(memoryview(self.try_for("read", path, act)), np.uint8)
        except FileNotFoundError as error:
            raise storage_error(self.location, "read", path, error) from error
