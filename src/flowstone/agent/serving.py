"""The child processes of the agent that serve a run to other nodes (agent/peers.py), one for each run."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from flowstone.config import PEER_SECRET_BYTES
from flowstone.store.memory.agent_wire import AgentRequest
from flowstone.store.memory.local_sockets import DIRECTORY_VARIABLE

_END_S = 5.0


class RunServer:
    """A child process that serves one run. The child ends once the pipe to it is closed.

    port       where the child listens; "" until the child has reported it
    output_fd  readable once the child has reported the port, or has ended
    """

    def __init__(self, run: str, directory: Path, node: str, request: AgentRequest) -> None:
        """Start the child. Raises OSError."""
        secret = _secret(request)
        if not PEER_SECRET_BYTES[0] <= len(secret) <= PEER_SECRET_BYTES[1]:
            limits = " to ".join(map(str, PEER_SECRET_BYTES))
            raise OSError(errno.EINVAL, f"the secret must have {limits} bytes, got {len(secret)}")
        self.run, self.port = run, ""
        self._address = request.target
        self._fingerprint = hashlib.sha256(secret).digest()
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "flowstone.agent.peers", run, node, request.target, str(request.number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, DIRECTORY_VARIABLE: str(directory)},
        )
        assert self.child.stdin is not None, "a pipe"
        assert self.child.stdout is not None, "a pipe"
        # does not block, since the line fits into the pipe's buffer
        os.write(self.child.stdin.fileno(), request.text.encode() + b"\n")
        self.output_fd = self.child.stdout.fileno()

    def read_port(self) -> bool:
        """Read the child's output. Returns False if the child has ended."""
        text = os.read(self.output_fd, 1000).decode().strip()
        self.port = text or self.port
        return bool(text)

    def check(self, request: AgentRequest) -> None:
        """Raise OSError if the secret or the address in the request is not the one that this child uses."""
        if hashlib.sha256(_secret(request)).digest() != self._fingerprint:
            raise OSError(errno.EACCES, "this run is already served with another secret")
        if request.target != self._address:
            raise OSError(
                errno.EADDRINUSE,
                f"this run is already served at {self._address}, and cannot be served at {request.target}",
            )

    def end(self) -> None:
        """End the child, and wait for its end."""
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


def _secret(request: AgentRequest) -> bytes:
    try:
        return bytes.fromhex(request.text)
    except ValueError:
        raise OSError(errno.EINVAL, "the secret is not in hex") from None
