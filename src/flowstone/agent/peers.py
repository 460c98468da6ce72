"""`python -m flowstone.agent.peers RUN NODE ADDRESS PORT`: serve a run in the agent's memory to other nodes.

This is a child process of the agent. The agent writes the job's secret to the child's standard input, reads the port
from its standard output, and ends the child by closing its standard input. The child sends requests to the agent like
any client. Each connection is served by its own thread. An invalid request, or a client that does not know the secret,
ends the connection.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
import time

from flowstone.agent.parities import Parities, Shares
from flowstone.agent.strangers import UnprovenConnections
from flowstone.commit.entries import SAVING, step_of
from flowstone.config import (
    MANIFEST_BYTES_MAX,
    PEER_CONNECTIONS_MAX,
    PEER_DESCRIPTION_BYTES_MAX,
    PEER_PART_BYTES,
    PEER_PUT_BYTES_MAX,
)
from flowstone.errors import FlowstoneError, FullError, MemoryAgentError, PeerError, escaped
from flowstone.format.digest import digest
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.store.memory.agent_wire import AgentRequest
from flowstone.store.memory.contents import MemoryFile
from flowstone.store.memory.node_memory import SCHEME, AgentTree
from flowstone.store.peers.memory import view_of
from flowstone.store.peers.wire import Channel, PeerInventory, PeerRequest, PeerResponse, StepInventory, welcome

_BACKLOG = 128
_ENDED = {errno.EBADF, errno.EINVAL}  # errors of a listening socket that was closed or shut down
_FORWARDED = {"exists", "names", "look", "make_directory", "remove", "rename", "agree", "free"}
_CHANGING = {"make_directory", "remove", "rename", "agree", "create", "put", "gather"}
_HOLDER_CHARS_MAX = 2000
_OPEN_MAX = 64  # how many files one connection keeps open to read
_ACCEPT_RETRY_S = 0.1  # seconds of pause after a failed accept


def main() -> int:
    """Serve until the agent ends this process. Returns the exit status."""
    run, node, address, port = sys.argv[1:]
    secret = bytes.fromhex(os.read(0, 4096).decode())
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, int(port)))
        listener.listen(_BACKLOG)
    except OSError as error:
        print(f"cannot serve memory://{run} at {address}, port {port}: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    server = PeerServer(run, node, secret, listener)
    threading.Thread(target=server.serve, name="flowstone-peers", daemon=True).start()
    os.write(1, f"{listener.getsockname()[1]}\n".encode())
    while os.read(0, 1):
        pass
    return 0


class PeerServer:
    """Serves one run to clients that know its secret."""

    def __init__(self, run: str, node: str, secret: bytes, listener: socket.socket) -> None:
        self.run, self.node = run, node
        self.tree = AgentTree(run, f"{SCHEME}{run}")
        self._secret, self._listener = secret, listener
        self._guard = threading.Lock()  # guards the attributes below
        self._open = 0
        self._strangers = UnprovenConnections(self.log)
        self._writer: Channel | None = None
        self._holder = ""
        self._drafts: set[str] = set()  # directories of unfinished checkpoints that were created under the current lock
        self.parities = Parities(self.tree)
        self._manifests: dict[int, str] = {}  # number of a manifest's file -> digest of the manifest

    def serve(self) -> None:
        """Accept connections until the listening socket is closed or shut down."""
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if error.errno in _ENDED:
                    return
                self.log(f"cannot accept a connection: {error}")
                # without free descriptors, each attempt fails at once, and would add a line to the log
                time.sleep(_ACCEPT_RETRY_S)
                continue
            with self._guard:
                is_full = self._open >= PEER_CONNECTIONS_MAX
                self._open += not is_full
            if is_full:
                self._strangers.log_refusal(peer[0], "refused: too many connections")
                connection.close()
                continue
            self._strangers.admit(connection, peer[0])
            thread = threading.Thread(
                target=self._serve_connection, args=(connection, peer[0]), name="flowstone-peer", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more threads; other connections may end, and free some
                self._strangers.log_refusal(peer[0], f"refused: {error}")
                self._strangers.release(connection)
                connection.close()
                with self._guard:
                    self._open -= 1

    def log(self, message: str) -> None:
        print(f"memory://{self.run}, for other nodes: {message}", file=sys.stderr, flush=True)

    def _serve_connection(self, connection: socket.socket, address: str) -> None:
        """Serve one connection until it ends."""
        channel = None
        try:
            try:
                channel = welcome(connection, self.run, self._secret, self.node)
            except PeerError as error:
                self._strangers.log_refusal(address, error.message)
                return
            finally:
                self._strangers.release(connection)
            PeerSession(self, channel).serve()
        except (EOFError, ConnectionError, TimeoutError):
            pass  # the client has closed the connection
        except OSError as error:  # an error on this node, such as no memory to map a file: the client's connection ends
            self.log(f"{address}: {escaped(str(error))}")
        except PeerError as error:
            self.log(f"{address}: {escaped(error.message)}")
        except MemoryAgentError:
            os._exit(0)  # the agent has ended, and its memory with it
        finally:
            if channel is not None:
                self.unlock(channel)
            connection.close()
            with self._guard:
                self._open -= 1

    # The lock: each node has its own, for jobs on other nodes

    def lock(self, channel: Channel, holder: str) -> PeerResponse:
        with self._guard:
            if self._writer not in (None, channel):
                return PeerResponse(text=self._holder)
            self._writer, self._holder = channel, holder[:_HOLDER_CHARS_MAX]
            return PeerResponse(yes=True)

    def unlock(self, channel: Channel) -> None:
        with self._guard:
            if self._writer is channel:
                self._writer, self._holder = None, ""
                self._drafts.clear()

    def check_lock(self, channel: Channel, request: PeerRequest) -> None:
        """Raise OSError unless the connection may change the file.

        A connection may change a file if it holds the run's lock, or if the file is in the directory of an unfinished
        checkpoint that was created under the current lock. The second rule is needed because each rank of a job writes
        over its own connection, and only one of these has the lock.
        """
        directory, _, name = request.path.partition("/")
        with self._guard:
            is_holder, makes = self._writer is channel, request.verb == "make_directory" and not name
            if makes and directory and (is_holder or (self._writer is not None and directory.startswith(SAVING))):
                self._drafts.add(directory)
                return
            if is_holder and request.verb in ("remove", "rename") and not name:
                self._drafts.discard(directory)
            is_of_draft = bool(name) and request.verb != "rename" and directory in self._drafts
        makes_root = request == PeerRequest("make_directory")  # the store's root is created before the lock is taken
        if not is_holder and not is_of_draft and not makes_root:
            raise OSError(errno.EPERM, f"only the holder of the run's lock may change {escaped(request.path[:200])}")

    def lost_lock(self, channel: Channel) -> PeerResponse:
        with self._guard:
            return PeerResponse(yes=self._writer is channel, text=self._holder)

    # The inventory

    def inventory(self) -> PeerInventory:
        """The files that the run has at one moment, except files that are removed meanwhile."""
        tree = self.tree
        steps = {}
        with tree.hold():
            names = tree.names("")
            for name in names:
                if step_of(name) is not None and tree.exists(f"{name}/{MANIFEST_NAME}"):
                    files = {file: tree.stat(f"{name}/{file}") for file in tree.names(name)}
                    steps[name] = StepInventory(self._manifest_digest(name, files[MANIFEST_NAME]), files)
            answer, _ = tree.client.request(AgentRequest("agree"))
        return PeerInventory(answer.number, names, steps)

    def _manifest_digest(self, directory: str, stat: tuple[int, int]) -> str:
        number, size_bytes = stat
        if number not in self._manifests:
            file = self.tree.open(f"{directory}/{MANIFEST_NAME}")
            if len(self._manifests) > 1000:
                self._manifests.clear()
            self._manifests[number] = digest(file.read(0, min(size_bytes, MANIFEST_BYTES_MAX)))
        return self._manifests[number]


class PeerSession:
    """The requests of one client. For one thread."""

    def __init__(self, server: PeerServer, channel: Channel) -> None:
        self._server, self._channel, self._tree = server, channel, server.tree
        self._read: dict[int, MemoryFile] = {}
        self._created: dict[int, MemoryFile] = {}
        self._shares = Shares(server.parities, server.tree)

    def serve(self) -> None:
        """Answer requests until the client closes the connection. Raises EOFError, OSError, PeerError; and
        MemoryAgentError once the agent has ended.
        """
        while True:
            request = self._channel.receive(PeerRequest)
            try:
                answer = self._answer(request)
            except FullError as error:
                answer = PeerResponse(
                    errno=errno.ENOSPC, full=True, error=error.message, text=str(error.facts.get("needed", "")),
                    names=(str(error.facts.get("available", "")),),
                )
            except MemoryAgentError:
                raise
            except FlowstoneError as error:
                answer = PeerResponse(errno=getattr(error, "errno", 0) or errno.EIO, error=error.message)
            except _RefusedError as error:
                answer = PeerResponse(errno=error.errno or errno.EIO, error=error.strerror or str(error))
            if answer is not None:
                self._channel.send(answer)

    def _answer(self, request: PeerRequest) -> PeerResponse | None:
        """Answer a request, and receive the bytes that follow it. Returns None if the answer was already sent, together
        with bytes.
        """
        if request.verb == "put":
            return self._put(request)
        if request.verb == "fill":
            return self._fill(request)
        if request.verb in ("gather", "add"):
            return self._add(request)
        if request.payload_bytes:
            raise PeerError(
                "another node sends bytes with a request that has none",
                next="install the same release of flowstone on all nodes",
            )
        try:
            if request.verb in _CHANGING:
                self._server.check_lock(self._channel, request)
            if request.verb in _FORWARDED:
                return self._forwarded(request)
            if request.verb == "held":
                return PeerResponse(held=self._server.inventory())
            if request.verb == "create":
                file = self._tree.create(request.path, request.size_bytes)
                self._created[file.number] = file
                return PeerResponse(number=file.number)
            if request.verb == "lock":
                return self._server.lock(self._channel, request.text)
            if request.verb == "unlock":
                self._server.unlock(self._channel)
                return PeerResponse()
            if request.verb == "lost_lock":
                return self._server.lost_lock(self._channel)
            file = self._opened(request)
        except OSError as error:
            raise _RefusedError(error.errno, error.strerror) from error
        length = max(0, min(request.size_bytes, file.size_bytes - request.offset))
        self._channel.send(PeerResponse(payload_bytes=length))
        self._channel.send_file(file.fd, request.offset, length)
        return None

    def _forwarded(self, request: PeerRequest) -> PeerResponse:
        agent_request = AgentRequest(
            request.verb, request.path, request.target,  # type: ignore[arg-type]
            number=request.number, size_bytes=request.size_bytes,
        )
        if request.verb == "rename" and request.path.startswith(SAVING) and step_of(request.target) is not None:
            self._server.parities.check(request.path)
        makes = request.verb == "make_directory"
        with self._server.parities.renewing(request.path) if makes else contextlib.nullcontext(), self._tree.hold():
            answer, _ = self._tree.client.request(agent_request)
        return PeerResponse(
            number=answer.number, size_bytes=answer.size_bytes, yes=answer.yes, text=answer.text, names=answer.names
        )

    def _opened(self, request: PeerRequest) -> MemoryFile:
        """The file that the client wants to read. Raises OSError if the file at the path has another number than the
        requested one.
        """
        file = self._read.get(request.number)
        if file is None:
            file = self._tree.open(request.path)
            if file.number != request.number:
                raise OSError(errno.ENOENT, "the file was replaced by another one")
            if len(self._read) >= _OPEN_MAX:
                self._read.clear()
            self._read[request.number] = file
        return file

    def _put(self, request: PeerRequest) -> PeerResponse:
        if request.payload_bytes > PEER_PUT_BYTES_MAX:
            raise PeerError(
                "another node sends too many bytes for a small file", found=f"{request.payload_bytes} bytes",
                expected=f"at most {PEER_PUT_BYTES_MAX} bytes",
                next="install the same release of flowstone on all nodes",
            )
        content = bytearray(request.payload_bytes)
        self._channel.receive_into(memoryview(content))
        try:
            self._server.check_lock(self._channel, request)
            self._tree.put(request.path, bytes(content))
        except OSError as error:
            raise _RefusedError(error.errno, error.strerror) from error
        return PeerResponse()

    def _fill(self, request: PeerRequest) -> PeerResponse:
        """Receive bytes into a file that this client has created, and compare them with their digest."""
        file = self._created.get(request.number)
        end = request.offset + request.payload_bytes
        if file is None or request.payload_bytes > PEER_PART_BYTES or not 0 <= request.offset <= end <= file.size_bytes:
            raise PeerError(
                "another node sends bytes for an unknown file, or beyond the bounds of the file",
                next="install the same release of flowstone on all nodes",
            )
        mapping = file.mapped(writable=True)
        assert mapping is not None, "it has bytes"
        target = view_of(mapping.address + request.offset, request.payload_bytes)
        self._channel.receive_into(target)
        if digest(target) != request.text:
            return PeerResponse(
                errno=errno.EBADMSG, error=f"bytes {request.offset}..{end} do not match their digest after the transfer"
            )
        return PeerResponse(yes=True)

    def _add(self, request: PeerRequest) -> PeerResponse:
        """Receive a share of parity: its description, or a part of its bytes."""
        is_first = request.verb == "gather"
        if request.payload_bytes > (PEER_DESCRIPTION_BYTES_MAX if is_first else PEER_PART_BYTES):
            raise PeerError(
                "another node sends too many bytes in one message",
                next="install the same release of flowstone on all nodes",
            )
        if not is_first:
            self._shares.check(request)
        content = bytearray(request.payload_bytes)
        self._channel.receive_into(memoryview(content))
        try:
            if is_first:
                self._server.check_lock(self._channel, request)
                return PeerResponse(number=self._shares.gather(request, bytes(content)))
            self._shares.add(request, content)
        except OSError as error:
            raise _RefusedError(error.errno, error.strerror) from error
        return PeerResponse(yes=True)


class _RefusedError(OSError):
    """The agent refuses the request, and the client gets this error."""


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
