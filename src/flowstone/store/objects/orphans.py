"""Abort unfinished uploads of dead writers. Their parts cost money, although listings do not show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowstone.log import log
from flowstone.store.objects.foreign_names import bucket_and_prefix, s3_client

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket

_ABORTED_MAX = 10_000  # how many uploads one call aborts; the next writer aborts the rest


def abort_unfinished(location: str, bucket: Bucket) -> int:
    """Abort all unfinished uploads below the store's prefix, with boto3, as obstore cannot list them. Returns their
    number.

    Only the holder of the lease may call it: an aborted upload cannot be completed. Does nothing if boto3 is not
    installed or the store is not on S3. A failure is only logged: a lifecycle rule of the bucket can remove the parts.
    """
    if type(bucket).__name__ != "S3Store":
        return 0
    try:
        client = s3_client()
    except ImportError:
        return 0
    name, prefix = bucket_and_prefix(bucket)
    aborted = 0
    try:
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=name, Prefix=prefix):
            for upload in page.get("Uploads", ()):
                client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
                aborted += 1
                if aborted == _ABORTED_MAX:
                    return aborted
    except Exception as error:  # botocore may raise any error
        log.warning("%s: cannot remove unfinished uploads of earlier jobs: %s", location, error)
    return aborted
