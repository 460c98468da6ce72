"""The agent's children that serve a run to other nodes (agent/peers.py), one for each run."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from flowstone.config import PEER_SECRET_BYTES
from flowstone.store.agent_wire import Request
from flowstone.store.local_sockets import DIRECTORY_VARIABLE

_END_S = 5.0


class Serving:
    """A child that serves one run. It ends when the pipe to it does.

    port  where it listens; "" until it has said so
    told  readable once it has, or has ended
    """

    def __init__(self, run: str, directory: Path, node: str, asked: Request) -> None:
        """Raises OSError."""
        secret = _secret(asked)
        if not PEER_SECRET_BYTES[0] <= len(secret) <= PEER_SECRET_BYTES[1]:
            raise OSError(errno.EINVAL, "no secret")
        self.run, self.port = run, ""
        self._asked = asked.target
        self._fingerprint = hashlib.sha256(secret).digest()
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "flowstone.agent.peers", run, node, asked.target, str(asked.number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, DIRECTORY_VARIABLE: str(directory)},
        )
        assert self.child.stdin is not None, "a pipe"
        assert self.child.stdout is not None, "a pipe"
        os.write(self.child.stdin.fileno(), asked.text.encode() + b"\n")  # into the pipe's buffer: it is short
        self.told = self.child.stdout.fileno()

    def hear(self) -> bool:
        """Take what it says. False: it has ended."""
        said = os.read(self.told, 1000).decode().strip()
        self.port = said or self.port
        return bool(said)

    def check(self, asked: Request) -> None:
        """Raise OSError if that is not what this one serves."""
        if hashlib.sha256(_secret(asked)).digest() != self._fingerprint:
            raise OSError(errno.EACCES, "that run is served with another secret")
        if asked.target != self._asked:
            raise OSError(errno.EADDRINUSE, f"that run is served at {self._asked}, not at {asked.target}")

    def end(self) -> None:
        """Returns once it has ended."""
        assert self.child.stdin is not None, "a pipe"
        assert self.child.stdout is not None, "a pipe"
        self.child.stdin.close()
        self.child.terminate()
        try:
            self.child.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.child.stdout.close()


def _secret(asked: Request) -> bytes:
    try:
        return bytes.fromhex(asked.text)
    except ValueError:
        raise OSError(errno.EINVAL, "no secret") from None
