"""An S3 server on loopback, moto's, in a process of its own, with faults as of networks and busy stores.

As a program, it serves one bucket on a free port, which it prints. A seed determines the faults of `Faults`. Some are
below HTTP: connections are reset, and bodies end early.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

BUCKET = "bucket"
CONTROL, LOG = "/-/faults", "/-/requests"
KINDS = ("500", "slow down", "429", "reset before", "reset after", "truncated", "delayed", "stale list")
_ANSWERS = {  # status, and the error code of the store
    "500": ("500 Internal Server Error", "InternalError"), "slow down": ("503 Slow Down", "SlowDown"),
    "429": ("429 Too Many Requests", "TooManyRequests"), "denied": ("403 Forbidden", "AccessDenied"),
    "other region": ("301 Moved Permanently", "PermanentRedirect"),
    "quota": ("507 Insufficient Storage", "QuotaExceeded"),
    "not implemented": ("501 Not Implemented", "NotImplemented"), "expired": ("400 Bad Request", "ExpiredToken"),
    "unknown key": ("403 Forbidden", "InvalidAccessKeyId"),
    "malformed": ("400 Bad Request", "AuthorizationHeaderMalformed</Code><Region>eu-west-7</Region><Code>"),
}


class Faults:
    """A WSGI application around another one: a share of the requests fails, each in one way of `kinds`.

    Conditional requests run one after the other, as in a store that keeps its promises. moto alone checks first and
    then writes.
    """

    def __init__(self, inner: Callable[..., Iterable[bytes]]) -> None:
        self._inner, self._conditional, self._guard = inner, threading.Lock(), threading.Lock()
        self._changed = threading.Event()
        self._set({"seed": 0, "share": 0.0, "kinds": list(KINDS), "method": "", "only": ""})
        self._lists: dict[str, list[bytes]] = {}
        self._log: list[str] = []
        self._keys: list[str] = []

    def _set(self, asked: dict[str, Any]) -> None:
        self._changed.set()
        self._changed = threading.Event()
        self._random, self._share, self._kinds = random.Random(asked["seed"]), asked["share"], asked["kinds"]
        self._method, self._counts = asked["method"], dict.fromkeys((*KINDS, *_ANSWERS, "held"), 0)
        self._only = asked["only"]

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == CONTROL:
            return self._control(environ, start)
        if environ["PATH_INFO"] == LOG:
            return self._told(start)
        with self._guard:
            query = environ["QUERY_STRING"] and f"?{environ['QUERY_STRING']}"
            part = environ.get("HTTP_RANGE", "")
            self._log.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}{query} {part}".strip())
            signed = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2]
            self._keys.append(f"{signed.partition('/')[0]} {environ.get('HTTP_X_AMZ_SECURITY_TOKEN', '')}".strip())
        kind = self._draw(environ)
        if kind in _ANSWERS:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # or the client never reads the answer
            status, code = _ANSWERS[kind]
            body = f"<Error><Code>{code}</Code><Message>as the test asked</Message></Error>".encode()
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if kind == "held":
            self._changed.wait()
        if kind in ("reset before", "held"):
            return _reset(environ)
        if kind == "delayed":
            time.sleep(0.05)
        status, headers, body = self._answer(environ)
        if kind == "reset after":
            return _reset(environ)
        if kind == "truncated":
            start(status, [*headers, ("Connection", "close")])
            return _then_reset(environ, body[: len(body) // 2])
        if kind == "stale list":
            body = self._older(environ, body)
            headers = [(name, str(len(body)) if name.lower() == "content-length" else text) for name, text in headers]
        start(status, headers)
        return [body]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, list[tuple[str, str]], bytes]:
        collected: list[Any] = []
        in_turn = "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ
        with self._conditional if in_turn else contextlib.nullcontext():
            body = b"".join(self._inner(environ, lambda status, headers, *_: collected.extend((status, headers))))
        if _is_list(environ):
            with self._guard:
                self._lists.setdefault(environ["QUERY_STRING"], []).append(body)
        return collected[0], collected[1], body

    def _older(self, environ: dict[str, Any], body: bytes) -> bytes:
        with self._guard:
            known = self._lists.get(environ["QUERY_STRING"], [body])
            return known[max(0, len(known) - 3)]

    def _draw(self, environ: dict[str, Any]) -> str:
        with self._guard:
            if self._method not in ("", environ["REQUEST_METHOD"]) or self._random.random() >= self._share:
                return ""
            if not _is_one_of(environ, self._only):
                return ""
            kind = self._random.choice(self._kinds)
            if kind == "truncated" and environ["REQUEST_METHOD"] != "GET":
                kind = "reset after"
            if kind == "stale list" and not _is_list(environ):
                kind = "delayed"
            self._counts[kind] += 1
            return kind

    def _control(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        with self._guard:
            if environ["REQUEST_METHOD"] == "POST":
                self._set(json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))))
            body = json.dumps(self._counts).encode()
        start("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def _told(self, start: Callable[..., Any]) -> Iterable[bytes]:
        with self._guard:
            body = json.dumps({"requests": self._log, "keys": self._keys}).encode()
            self._log, self._keys = [], []
        start("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


def _is_list(environ: dict[str, Any]) -> bool:
    return environ["REQUEST_METHOD"] == "GET" and "list-type=2" in environ["QUERY_STRING"]


def _is_one_of(environ: dict[str, Any], kind: str) -> bool:
    """Whether a request is of that kind: "": any, "list", "conditional", "in place of a claim", "part" or "end" (of an
    upload).
    """
    if kind == "in place of a claim":
        return "HTTP_IF_MATCH" in environ
    if kind == "end":
        return environ["REQUEST_METHOD"] == "POST" and "uploadId=" in environ["QUERY_STRING"]
    if kind == "conditional":
        return "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ
    return not kind or (_is_list(environ) if kind == "list" else "partNumber=" in environ["QUERY_STRING"])


def _reset(environ: dict[str, Any]) -> Iterable[bytes]:
    """Close the connection without an answer, like a machine that has lost power."""
    connection: socket.socket = environ["werkzeug.socket"]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RD)  # the server finds no further request, and closes the connection
    raise ConnectionAbortedError


def _then_reset(environ: dict[str, Any], body: bytes) -> Iterator[bytes]:
    yield body
    _reset(environ)


def main() -> None:
    import logging

    from moto.server import create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    # S3's application itself: moto's dispatcher would list the folders of all its services at each request
    app = Faults(create_backend_app("s3"))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    server.log = lambda *_, **__: None  # type: ignore[method-assign]
    print(server.server_port, flush=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    server.serve_forever()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


class Server:
    """The server's process while this is open; `environment` has the variables that its clients need."""

    def __init__(self) -> None:
        environment = {**os.environ, "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._opener.open(urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT", headers={
            "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
        })).read()

    def fail(
        self, *, share: float, seed: int = 0, kinds: tuple[str, ...] = KINDS, method: str = "", only: str = ""
    ) -> None:
        """From now on that share of the requests (of that HTTP method and kind, see `_is_one_of`) fails.

        A "held" request fails when this is called again.
        """
        asked = {"seed": seed, "share": share, "kinds": list(kinds), "method": method, "only": only}
        self._opener.open(f"{self.url}{CONTROL}", json.dumps(asked).encode()).read()

    def failed(self) -> dict[str, int]:
        """The number of failed requests of each kind since `fail` was called."""
        counts: dict[str, int] = json.load(self._opener.open(f"{self.url}{CONTROL}"))
        return counts

    def requests(self) -> list[str]:
        """Method, path, query and range of all requests since the last call, including failed ones."""
        requests: list[str] = self._told()["requests"]
        return requests

    def keys(self) -> set[str]:
        """The keys and session tokens that signed the requests since the last call; "" for unsigned ones."""
        return set(self._told()["keys"])

    def _told(self) -> dict[str, Any]:
        record: dict[str, Any] = json.load(self._opener.open(f"{self.url}{LOG}"))
        return record

    def uploads(self, url: str = f"s3://{BUCKET}") -> list[str]:
        """Names of unfinished multipart uploads below a URL."""
        text = self._opener.open(urllib.request.Request(f"{self.url}/{BUCKET}?uploads", headers={
            "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
        })).read().decode()
        names = [urllib.parse.unquote(part.partition("</Key>")[0]) for part in text.split("<Key>")[1:]]
        prefix = url.removeprefix(f"s3://{BUCKET}").lstrip("/")
        return [name for name in names if not prefix or name.startswith(f"{prefix}/")]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server, and this process' environment set for it."""
    server = Server()
    try:
        with mock.patch.dict(os.environ, server.environment):
            yield server
    finally:
        server.close()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # modules of tests must not hide packages
    main()
