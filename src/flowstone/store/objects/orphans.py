"""Unfinished uploads of dead writers: parts that no list of objects shows, and that cost money."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowstone.log import log
from flowstone.store.objects.foreign_names import place_of, s3_client

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket

_ABORTED_MAX = 10_000  # by one call: what is left goes with the next writer


def abort_unfinished(location: str, bucket: Bucket) -> int:
    """Abort every unfinished upload below the store's prefix, by boto3, as obstore cannot list them. Returns how many.

    Only the holder of the lease may call it: whose upload is aborted can complete it no more. Does nothing where boto3
    is not installed, or the store is not S3's; a failure is logged, as the bucket's own rule will remove them.
    """
    if type(bucket).__name__ != "S3Store":
        return 0
    try:
        client = s3_client()
    except ImportError:
        return 0
    name, prefix = place_of(bucket)
    aborted = 0
    try:
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=name, Prefix=prefix):
            for upload in page.get("Uploads", ()):
                client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
                aborted += 1
                if aborted == _ABORTED_MAX:
                    return aborted
    except Exception as error:  # any of botocore's, which this module does not name
        log.warning("%s: unfinished uploads of earlier jobs could not be removed: %s", location, error)
    return aborted
