"""Requests to an object store. Requests that are safe to repeat are retried within a time budget. Raises StorageError.

obstore makes each request only once, since only this module knows what to do if an answer is lost. Parts of an upload
are an exception: obstore has their bytes, and retries them itself.
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
from flowstone.store.objects.failures import begins_behind, is_missing, is_taken, is_transient, storage_error
from flowstone.store.objects.foreign_names import ENDPOINTS, Listing, is_refused, list_all, to_listing
from flowstone.store.objects.profiles import profile_arguments
from flowstone.store.urls import parse

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from obstore import Bytes, GetOptions, ObjectMeta, PutMode
    from obstore.store import BackoffConfig, ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Bucket

T = TypeVar("T")

# an attribute of small objects, which distinguishes equal bytes that are put within one second
_OF_CALL = "flowstone-call"
_PART_ATTEMPTS_MAX = 20
DIRECTORY_NAME = ".flowstone-directory"  # an object with this name marks a prefix as a directory
_COPY_PART_BYTES = 16 * MIB  # length of the parts when an object is copied through this machine


class RetryPolicy(msgspec.Struct, frozen=True):
    """Time limits of requests that may be retried.

    budget_s       seconds from the first attempt until no further attempt is made
    request_s      seconds for one attempt, including the transfer of its data
    """

    budget_s: float = 60.0
    request_s: float = 120.0
    first_delay_s: float = 0.1
    delay_s_max: float = 5.0

    def delay_s(self, attempt: int) -> float:
        """The delay after attempt number `attempt`, in seconds. It doubles with each attempt, and varies randomly, so
        that clients do not retry at the same time.
        """
        return min(self.delay_s_max, self.first_delay_s * 2.0 ** min(attempt, 30)) * (0.5 + random.random() / 2)


def bare(tag: str | None) -> str | None:
    """An ETag without its quotes."""
    return tag if tag is None else tag.strip('"')


def same_tag(first: str | None, second: str | None) -> bool:
    """Whether two ETags are equal. Servers return the same tag sometimes with and sometimes without quotes."""
    return bare(first) == bare(second)


def open_bucket(url: str, patience: RetryPolicy) -> tuple[Bucket, Bucket]:
    """Open a URL as two obstore stores: the first makes each request only once, the second retries parts of uploads.
    Makes no request.

    raises  FrameworkError  obstore is not installed, or the AWS profile needs boto3, which is not installed
            ArgumentError   obstore does not accept the URL, or the profile cannot be used
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
        client["allow_http"] = True  # other programs that read this environment variable accept http for it, too
        # If a server sends the head and the body of an answer in two packets, as Ceph's gateway does, the body is
        # delayed by 40 ms on a reused connection: the server waits (Nagle) for the client's delayed ACK. A new
        # connection has no such delay, and without TLS costs only one round trip.
        client["pool_max_idle_per_host"] = "0"
    first, longest = timedelta(seconds=patience.first_delay_s), timedelta(seconds=patience.delay_s_max)
    backoff: BackoffConfig = {"init_backoff": first, "max_backoff": longest, "base": 2}
    budget = timedelta(seconds=patience.budget_s)
    repeats: RetryConfig = {"max_retries": _PART_ATTEMPTS_MAX, "retry_timeout": budget, "backoff": backoff}
    no_repeats: RetryConfig = {"max_retries": 0}
    make = cast("Callable[..., Bucket]", from_url)  # each overload of this function is for one kind of store
    parts = parse(url)
    try:
        profile = profile_arguments(url)
        once = make(parts.quoted, client_options=client, retry_config=no_repeats, **profile)
        repeating = make(parts.quoted, client_options=client, retry_config=repeats, **profile)
    except (BaseError, ValueError) as error:
        raise ArgumentError(
            f"{url} is not the URL of an object store: {str(error).partition(chr(10))[0]}",
            next="write s3://bucket/path, gs://bucket/path or az://container/path",
        ) from error
    used = {str(cast("Any", bucket).prefix or "") for bucket in (once, repeating)}
    assert used == {parts.prefix}, f"obstore takes {url} for {used}"
    return once, repeating


class Client:
    """Makes the requests for the objects of one store. Can be used on any thread.

    once, repeating  the two obstore stores of `open_bucket`; both are the same if there is no server
    """

    def __init__(self, location: str, once: Bucket, repeating: Bucket, patience: RetryPolicy) -> None:
        self.location, self.once, self.repeating, self.patience = location, once, repeating, patience
        self._has_tokens = type(once).__name__ == "S3Store"
        # whether the store may keep the given memory after the call has returned
        self.keeps_buffers = type(once).__name__ in ("MemoryStore", "FileSystemBucket")
        self._with_foreign_names: set[str] = set()  # directories whose foreign names were already logged
        self._tags_are_bare = False  # whether the server needs tags without quotes: see `replace`

    def retry(self, operation: str, path: str, act: Callable[[], T]) -> T:
        """Call `act`, and repeat it after failures that may pass. `act` must be safe to repeat even if an earlier
        attempt has succeeded.

        raises  StorageError
                FileNotFoundError  the object does not exist
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
        """Wait before the next attempt. Raises StorageError if another attempt cannot help, or the time budget is
        spent.
        """
        delay, spent = self.patience.delay_s(attempt), time.monotonic() - began
        if not is_transient(error):
            raise storage_error(self.location, operation, path, error) from error
        if spent + delay > self.patience.budget_s:
            raise storage_error(self.location, operation, path, error, tried_s=spent) from error
        log.debug("%s: cannot %s %s yet (%s)", self.location, operation, path, error)
        time.sleep(delay)

    def head(self, path: str) -> ObjectMeta | None:
        """The metadata of an object; None if it does not exist."""
        try:
            return self.retry("look for", path, lambda: self.once.head(path))
        except FileNotFoundError:
            return None

    def tag(self, path: str) -> str | None:
        """The ETag of an object, which differs from that of any other object with this name; None if the object does
        not exist.
        """
        meta = self.head(path)
        return None if meta is None else meta["e_tag"]

    def token(self, path: str) -> str:
        """The token that `put_new` stored with the object; "" if it has none."""
        if not self._has_tokens:
            return ""
        attributes = self.retry("look at", path, lambda: self.once.get(path, options={"head": True}).attributes)
        return str(cast("dict[str, object]", attributes).get(_OF_CALL, ""))

    def get(self, path: str, options: GetOptions | None = None, *, check: Callable[[int], None] | None = None) -> bytes:
        """An object's bytes. `check` is called with its size before any byte is read.

        raises  StorageError  with ENOENT if the object does not exist
        """
        def act() -> bytes:
            result = self.once.get(path, options=options)
            if check is not None:
                check(result.meta["size"])
            return bytes(result.bytes())

        try:
            return self.retry("read", path, act)
        except FileNotFoundError as error:
            raise storage_error(self.location, "read", path, error) from error

    def find(self, path: str) -> tuple[bytes, str | None] | None:
        """The bytes of an object, and their ETag. None if the object does not exist."""
        def act() -> tuple[bytes, str | None]:
            result = self.once.get(path)
            return bytes(result.bytes()), result.meta["e_tag"]

        try:
            return self.retry("read", path, act)
        except FileNotFoundError:
            return None

    def entries(self, path: str) -> Listing:
        """The names in a directory. Names that Flowstone cannot have written are logged, once for each directory."""
        refused: StorageError | None = None
        if path not in self._with_foreign_names:
            try:
                listed = self.retry("list", path, lambda: self.once.list_with_delimiter(path or None))
            except StorageError as error:
                if not is_refused(error.__cause__):
                    raise
                refused = error
            else:
                return to_listing(path, listed)
        listing = self.retry("list", path, lambda: list_all(self.location, self.once, path, refused))
        if listing.foreign and path not in self._with_foreign_names:
            self._with_foreign_names.add(path)
            log.warning(
                "ignoring objects in %s that Flowstone did not write: %s", f"{self.location}/{path}".rstrip("/"),
                ", ".join(listing.foreign[:5]),
            )
        return listing

    def put_new(self, path: str, data: bytes, token: str) -> str | None:
        """Create an object atomically. Returns its ETag.

        An attempt whose answer is lost may have succeeded. So an object that has exactly these bytes and this token
        counts as created by this call. `token` must be unique for each call.

        raises  StorageError  with EEXIST if another call has created the object
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
                    if not is_transient(error):
                        raise
                    if self.is_ours(path, data, token):
                        return None
                    spent = time.monotonic() - began
                    raise storage_error(
                        self.location, "write", path, error, tried_s=spent,
                        outcome="unknown: the object may exist",
                    ) from refusal
                is_lost, attempt = True, attempt + 1

    def is_ours(self, path: str, data: bytes, token: str) -> bool:
        """Whether the call of `put_new` with this token has written the object. False if that cannot be determined."""
        try:
            return self.get(path) == data and self.token(path) in ("", token)
        except (StorageError, FileNotFoundError):
            return False

    def replace(self, path: str, data: bytes, tag: str | None) -> str | None:
        """Replace the object if it has the ETag `tag`. Returns the new ETag. Returns None if the object has another
        ETag or no longer exists.

        Ceph's gateway up to version 16 treats the quotes in If-Match as a part of the tag, and so refuses its own tags.
        After such a refusal, tags are sent without quotes.

        raises  StorageError
        """
        began, attempt, is_lost = time.monotonic(), 0, False
        while True:
            condition = bare(tag) if self._tags_are_bare else tag
            try:
                mode = cast("PutMode", {"e_tag": condition})
                return self.once.put(path, data, mode=mode, use_multipart=False)["e_tag"]
            except FileNotFoundError:
                return None
            except Exception as error:
                if is_taken(error):
                    meta = self.head(path)
                    if meta is None or (is_lost and self.is_ours(path, data, "")):
                        return None if meta is None else meta["e_tag"]
                    if condition != bare(tag) and same_tag(meta["e_tag"], tag):
                        self._tags_are_bare = True
                        continue
                    return None
                self.pause("write", path, error, began, attempt)
                is_lost, attempt = True, attempt + 1

    def check_conditional(self, path: str, data: bytes) -> None:
        """Raise StorageError if the store ignores conditions, that is, if it accepts a put-if-absent of `data` to
        `path`, although that object exists.
        """
        def act() -> bool:
            try:
                self.once.put(path, data, mode="create", use_multipart=False)
            except Exception as error:
                if is_taken(error):
                    return True
                raise
            return False

        if not self.retry("write", path, act):
            raise StorageError(
                f"{self.location} cannot commit a checkpoint", errno=errno.ENOTSUP,
                reason="the store ignores If-None-Match, so two jobs could commit the same step",
                next="use a store with conditional puts (If-None-Match, If-Match)",
            )

    def delete(self, path: str) -> None:
        """Remove an object, if it exists."""
        try:
            self.retry("remove", path, lambda: self.once.delete(path))
        except FileNotFoundError:
            return

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store. If the object is too large for the store's copy request, its bytes go
        through this machine.
        """
        try:
            self.retry("copy", source, lambda: self.once.copy(source, target))
        except FileNotFoundError as error:
            raise storage_error(self.location, "rename", source, error) from error
        except StorageError as error:
            meta = self.head(source)
            if error.errno == errno.EACCES or meta is None:
                raise
            self.retry("copy", source, lambda: self.repeating.put(
                target, self.once.get(source).stream(_COPY_PART_BYTES), use_multipart=True,
                chunk_size=max(_COPY_PART_BYTES, meta["size"] // 9_000),
            ))

    def read_range(self, path: str, offset: int, length: int) -> NDArray[np.uint8]:
        """The bytes of a range of an object, in memory that obstore has allocated. There are fewer bytes than `length`
        if the object ends.

        raises  StorageError  with ENOENT if the object does not exist
        """
        def act() -> Bytes | bytes:
            try:
                return self.once.get_range(path, start=offset, length=length)
            except Exception as error:
                if begins_behind(error):
                    return b""
                raise

        try:
            return np.frombuffer(memoryview(self.retry("read", path, act)), np.uint8)
        except FileNotFoundError as error:
            raise storage_error(self.location, "read", path, error) from error
