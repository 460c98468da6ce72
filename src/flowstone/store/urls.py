"""URLs of object stores, parsed strictly, so that different URLs are different stores.

Other programs cut a URL at `#` and `?`, decode `%20`, and resolve `..`, so that two different URLs may mean one store.
Such URLs are refused. A scheme with several names gets one name (s3a becomes s3); otherwise one location could be taken
for two stores.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from flowstone.errors import ArgumentError

FSSPEC = "fsspec+"  # prefix of a URL whose scheme fsspec opens (store/objects/file_system.py)
SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"})
_AZURE = frozenset({"az", "azure", "adl", "abfs", "abfss"})
_FSSPEC_ALIASES = {"s3a": "s3", "gcs": "gs", "local": "file", "ssh": "sftp", "abfs": "az", "abfss": "az"}
# schemes with a user's name before `@`; in other schemes that text may be a token
_WITH_USERS = frozenset({"ftp", "hdfs", "sftp", "ssh"})
_WITHOUT_HOST = frozenset({"file", "local", "memory"})
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//|/(?=[^/]))")
_BUCKET = re.compile(r"[$A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*", re.ASCII)
_PORT = re.compile(r"[^:@]*:\d*", re.ASCII)
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}", re.ASCII)


class ObjectUrl(str):
    """The URL of an object store, which was checked and normalized: one name for each scheme, no slash at the end."""

    __slots__ = ()

    @property
    def shown(self) -> str:
        """The URL for messages, with any password replaced."""
        return without_secrets(self)


class BucketUrl(msgspec.Struct, frozen=True):
    """The parts of a URL of S3, Google Cloud Storage or Azure.

    bucket  the name of the bucket; with Azure it may be container@account
    prefix  prefix of all objects' names, without a slash at either end; "" for the bucket's root
    """

    scheme: str
    bucket: str
    prefix: str

    @property
    def quoted(self) -> str:
        """The URL for programs that decode percent escapes."""
        return f"{self.scheme}://{self.bucket}/{quote(self.prefix)}"


def object_url(path: object) -> ObjectUrl | None:
    """`path` as the URL of an object store; None if it is not such a URL. If it is a `pathlib.Path`, two slashes may
    have been merged into one.

    raises  ArgumentError  other programs would read the URL differently, or the URL has credentials
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    match = URL.match(text) if isinstance(text, str) else None
    if not isinstance(text, str) or match is None:
        return None
    scheme, rest = match[1].lower(), text[match.end() :]
    if scheme.startswith(FSSPEC):
        name = scheme.removeprefix(FSSPEC)
        scheme = FSSPEC + _FSSPEC_ALIASES.get(name, name)
        if match[2] == "/" and scheme.removeprefix(FSSPEC) in _WITHOUT_HOST:
            rest = f"/{rest}"  # pathlib.Path has merged three slashes
        return _of_fsspec(scheme, rest)
    return ObjectUrl(_joined(parse(f"{scheme}://{rest}"))) if scheme in SCHEMES else None


def parse(url: str) -> BucketUrl:
    """The parts of a URL of an object store. Raises ArgumentError."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    _check_characters(url, rest)
    if ":" in bucket or ("@" in bucket and scheme not in _AZURE):
        raise _refused(
            url, "it contains credentials", "leave them out, and set them in the environment, as for other programs "
            "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY)",
        )
    container, separator, account = bucket.partition("@")
    if not _BUCKET.fullmatch(container) or (separator and not _ACCOUNT.fullmatch(account)):
        raise _refused(
            url, f"{bucket!r} is not the name of a bucket" if bucket else "it names no bucket",
            "write s3://bucket/path, gs://bucket/path or az://container/path",
        )
    prefix = prefix.removesuffix("/")
    escape = _ESCAPE.search(prefix)
    if escape is not None:
        raise _refused(
            url, f"some programs decode {escape[0]} and others do not", "write the character itself, or choose another "
            "name",
        )
    check_parts(url, prefix.split("/") if prefix else ())
    if scheme in _AZURE:
        account = account.lower().replace(".blob.core.windows.net", ".dfs.core.windows.net")
        return BucketUrl("abfss" if separator else "az", f"{container}{separator}{account}", prefix)
    return BucketUrl("s3" if scheme == "s3a" else scheme, bucket, prefix)


def _joined(url: BucketUrl) -> str:
    return f"{url.scheme}://{url.bucket}/{url.prefix}".rstrip("/")


def _of_fsspec(scheme: str, rest: str) -> ObjectUrl:
    """The URL that fsspec opens. It may contain a user and a password, since fsspec accepts these nowhere else."""
    url = f"{scheme}://{rest}"
    _check_characters(url, rest)
    host = rest.partition("/")[0]
    if ":" in host and "@" not in host and not _PORT.fullmatch(host):
        raise _refused(
            url, "after its ':' there is neither a port nor a password that ends with '@'",
            "write a slash in a password as %2F, or give the file system itself to fs.Fsspec",
        )
    trimmed = rest.removesuffix("/") or rest
    check_parts(url, trimmed.partition("/")[2].split("/") if "/" in trimmed.removesuffix("/") else ())
    return ObjectUrl(f"{scheme}://{trimmed}")


def _check_characters(url: str, rest: str) -> None:
    for mark in "#?":
        if mark in rest:
            used = without_secrets(url).partition(mark)[0]
            earlier = (
                "; earlier versions of Flowstone also ignored that text, so checkpoints that they saved to this URL "
                f"are in {used}"
            )
            raise _refused(
                url, f"it contains {mark!r}, and other programs ignore the text after it",
                "choose a name without it" + ("" if url.startswith(FSSPEC) else earlier),
            )
    try:
        rest.encode()
    except UnicodeEncodeError:
        raise _refused(url, "it is not UTF-8", "choose another name") from None


def check_parts(shown: str, parts: Sequence[str]) -> None:
    """Raise ArgumentError unless each part of a path, between slashes, is a valid name. `shown`: the URL for messages.
    """
    for part in parts:
        control = next((char for char in part if ord(char) < 32 or 127 <= ord(char) < 160), None)
        if control is not None:
            raise _refused(
                shown, f"it contains the control character {control!r}",
                "remove it; does a variable end with a line break?",
            )
        if part in (".", ".."):
            raise _refused(shown, f"its part {part!r} is not a name", "write the path without it")
        if not part:
            raise _refused(shown, "a part between two slashes is empty", "write one slash; is a variable unset?")


def _refused(url: str, reason: str, remedy: str) -> ArgumentError:
    return ArgumentError(f"{without_secrets(url)!r} is not the URL of a store: {reason}", next=remedy)


def without_secrets(url: str) -> str:
    """A URL of any scheme, for messages: each part that may be a password, a key or a signature is replaced by `***`.
    """
    scheme, slashes, rest = url.partition("://")
    if not slashes:
        scheme, slashes, rest = url.partition(":/")
    host, behind = rest.partition("/")[0], rest
    name, separator = "", ""
    if "@" in host:
        user, separator, behind = rest[: len(host)].rpartition("@")
        name, behind = _without_password(scheme, user), behind + rest[len(host) :]
    elif ":" in host and not _PORT.fullmatch(host):
        # The key may contain a slash, so it ends at the last `@`.
        name, separator, behind = f"{host.partition(':')[0]}:***", "@", rest.rpartition("@")[2] if "@" in rest else ""
    behind, mark, query = behind.partition("?")
    return f"{scheme}{slashes}{name}{separator}{behind}{mark}{'***' if query else ''}"


def _without_password(scheme: str, user: str) -> str:
    name, colon, _ = user.partition(":")
    if colon:
        return f"{name}:***"
    is_known = scheme in _AZURE or scheme in _WITH_USERS or scheme.startswith(FSSPEC)
    return name if is_known else "***"
