"""One S3 server for all tests of stores in buckets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from object_server import BUCKET, Server, serving

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    """Of a store that nobody else uses. Nothing fails unless the test asks for it."""
    yield f"s3://{BUCKET}/run-{next(_numbers)}"
    server.fail(share=0)
