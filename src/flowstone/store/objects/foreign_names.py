"""Lists directories that obstore cannot list, because they contain objects of other programs whose names obstore
refuses.

Such names have an empty component (`run//x`), `.`, `..` or control characters. Flowstone never writes such names, so
they are skipped and logged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from flowstone.errors import FrameworkError, StorageError
from flowstone.store.objects.failures import server_error_of

if TYPE_CHECKING:
    from obstore import ListResult, ObjectMeta
    from obstore.store import ObjectStore as Bucket

ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_SAYS = ("Encountered object with invalid path", "Got invalid XML")


class Listing(msgspec.Struct, frozen=True):
    """The names in a directory: objects, directories, and foreign names, which Flowstone cannot have written. Foreign
    names are quoted, for a message.
    """

    objects: list[str]
    directories: list[str]
    foreign: list[str]

    def __bool__(self) -> bool:
        return bool(self.objects or self.directories or self.foreign)


def is_refused(error: BaseException | None) -> bool:
    """Whether the error means that obstore refuses a listing because of a name in it."""
    return error is not None and any(says in server_error_of(error).text for says in _SAYS)


def s3_client() -> Any:
    """A boto3 client for the endpoint and region in the environment variables, which obstore reads, too. Raises
    ImportError.
    """
    import boto3
    from botocore.config import Config

    endpoint, region = (
        next((value for name in names if (value := os.environ.get(name))), None) for names in (ENDPOINTS, _REGIONS)
    )
    patience = Config(connect_timeout=5, read_timeout=20, retries={"max_attempts": 3, "mode": "standard"})
    return boto3.client("s3", endpoint_url=endpoint, region_name=region, config=patience)


def bucket_and_prefix(bucket: Bucket, path: str = "") -> tuple[str, str]:
    """The name of the S3 bucket, and the prefix of all keys below `path`."""
    settings: Any = bucket
    return settings.config["bucket"], "".join(f"{part}/" for part in (settings.prefix, path) if part)


def list_all(location: str, bucket: Bucket, path: str, refused: StorageError | None = None) -> Listing:
    """List a directory in an S3 bucket with boto3, which refuses no name.

    refused  the error of obstore's listing
    raises   FrameworkError  the bucket is not on S3, or boto3 is not installed
             all errors of boto3
    """
    is_s3 = type(bucket).__name__ == "S3Store"
    remedy = "remove that object, which Flowstone did not write"
    try:
        if not is_s3:
            raise ImportError("boto3 can be used only for S3, and this is not an S3 bucket")
        client = s3_client()
    except ImportError as error:
        raise FrameworkError(
            f"cannot list {f'{location}/{path}'.rstrip('/')}: an object in it has a name that obstore refuses",
            reason="" if refused is None else refused.facts["reason"],
            next=f"pip install boto3, with which Flowstone can ignore this object; or {remedy}" if is_s3 else remedy,
        ) from error
    name, prefix = bucket_and_prefix(bucket, path)
    listing = Listing([], [], [])
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=name, Prefix=prefix, Delimiter="/"):
        for entry in page.get("Contents", ()):
            _add(listing, path, entry["Key"][len(prefix) :])
        for entry in page.get("CommonPrefixes", ()):
            _add(listing, path, entry["Prefix"][len(prefix) :])
    return listing


def _add(listing: Listing, path: str, name: str) -> None:
    """Add a name to a listing. A name that ends with a slash is a directory. The name "" is the directory's own object,
    which web consoles create.
    """
    own = name.removesuffix("/")
    if own in (".", "..") or any(ord(char) < 32 or 127 <= ord(char) < 160 for char in own) or name == "/":
        listing.foreign.append(repr(name))
    elif own:
        (listing.directories if name != own else listing.objects).append(own)
    elif path:
        listing.foreign.append(repr(f"{path}/"))


def to_listing(path: str, listed: ListResult[Sequence[ObjectMeta]]) -> Listing:
    """Convert a result of obstore to a `Listing`."""
    listing = Listing([], [], [])
    for entry in listed["objects"]:
        _add(listing, path, "" if entry["path"] == path else entry["path"].rpartition("/")[2])
    for name in listed["common_prefixes"]:
        _add(listing, path, f"{str(name).rstrip('/').rpartition('/')[2]}/")
    return listing
