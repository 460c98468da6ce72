"""`python -m flowstone.agent.peers RUN NODE ADDRESS PORT`: other nodes are served what the agent holds of a run.

A child of the agent, which gives it the job's secret on its standard input, is told where it listens, and ends it by
closing that. It asks the agent like any client. A thread serves each connection; what it does not understand, or who
does not know the secret, ends that connection.
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
from flowstone.agent.strangers import Strangers
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
from flowstone.store.agent_wire import Request
from flowstone.store.contents import MemoryFile
from flowstone.store.node_memory import SCHEME, AgentTree
from flowstone.store.peers.memory import view_of
from flowstone.store.peers.wire import Ask, Channel, Held, HeldStep, Told, welcome

_BACKLOG = 128
_ENDED = {errno.EBADF, errno.EINVAL}  # of a listener that is closed, of one that is shut down
_FORWARDED = {"exists", "names", "look", "make_directory", "remove", "rename", "agree", "free"}
_CHANGING = {"make_directory", "remove", "rename", "agree", "create", "put", "gather"}
_HOLDER_CHARS_MAX = 2000
_OPEN_MAX = 64  # files that one connection keeps open to read
_REFUSED_S = 0.1  # before it is tried again to accept a connection


def main() -> int:
    """The exit status."""
    run, node, address, port = sys.argv[1:]
    secret = bytes.fromhex(os.read(0, 4096).decode())
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, int(port)))
        listener.listen(_BACKLOG)
    except OSError as error:
        print(f"memory://{run} is not served at {address}, port {port}: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    server = PeerServer(run, node, secret, listener)
    threading.Thread(target=server.serve, name="flowstone-peers", daemon=True).start()
    os.write(1, f"{listener.getsockname()[1]}\n".encode())
    while os.read(0, 1):
        pass
    return 0


class PeerServer:
    """Serves one run to who knows its secret."""

    def __init__(self, run: str, node: str, secret: bytes, listener: socket.socket) -> None:
        self.run, self.node = run, node
        self.tree = AgentTree(run, f"{SCHEME}{run}")
        self._secret, self._listener = secret, listener
        self._guard = threading.Lock()  # of what follows
        self._open = 0
        self._strangers = Strangers(self.tell)
        self._writer: Channel | None = None
        self._holder = ""
        self._drafts: set[str] = set()  # what was made since the lock is held, to be written into
        self.parities = Parities(self.tree)
        self._manifests: dict[int, str] = {}  # digests, by the number of the file

    def serve(self) -> None:
        """Until its listener is closed, or shut down."""
        while True:
            try:
                connection, where = self._listener.accept()
            except OSError as error:
                if error.errno in _ENDED:
                    return
                self.tell(f"cannot accept a connection: {error}")
                time.sleep(_REFUSED_S)  # without descriptors each try is refused at once, and would fill the log
                continue
            with self._guard:
                is_full = self._open >= PEER_CONNECTIONS_MAX
                self._open += not is_full
            if is_full:
                self._strangers.log_refusal(where[0], "refused: too many connections")
                connection.close()
                continue
            self._strangers.admit(connection, where[0])
            attend = threading.Thread(
                target=self._attend, args=(connection, where[0]), name="flowstone-peer", daemon=True
            )
            try:
                attend.start()
            except RuntimeError as error:  # the system is out of threads: others that are served may end
                self._strangers.log_refusal(where[0], f"refused: {error}")
                self._strangers.release(connection)
                connection.close()
                with self._guard:
                    self._open -= 1

    def tell(self, what: str) -> None:
        print(f"memory://{self.run}, for other nodes: {what}", file=sys.stderr, flush=True)

    def _attend(self, connection: socket.socket, where: str) -> None:
        """One connection, to its end."""
        channel = None
        try:
            try:
                channel = welcome(connection, self.run, self._secret, self.node)
            except PeerError as error:
                self._strangers.log_refusal(where, error.message)
                return
            finally:
                self._strangers.release(connection)
            Attendance(self, channel).serve()
        except (EOFError, ConnectionError, TimeoutError):
            pass  # it has gone
        except OSError as error:  # not the other side's: without memory to map a file, say. It sees its connection end
            self.tell(f"{where}: {escaped(str(error))}")
        except PeerError as error:
            self.tell(f"{where}: {escaped(error.message)}")
        except MemoryAgentError:
            os._exit(0)  # what was served is gone
        finally:
            if channel is not None:
                self.unlock(channel)
            connection.close()
            with self._guard:
                self._open -= 1

    # The lock: of all nodes, each has one for jobs on other nodes

    def lock(self, channel: Channel, holder: str) -> Told:
        with self._guard:
            if self._writer not in (None, channel):
                return Told(text=self._holder)
            self._writer, self._holder = channel, holder[:_HOLDER_CHARS_MAX]
            return Told(yes=True)

    def unlock(self, channel: Channel) -> None:
        with self._guard:
            if self._writer is channel:
                self._writer, self._holder = None, ""
                self._drafts.clear()

    def check_lock(self, channel: Channel, asked: Ask) -> None:
        """Raise OSError unless the channel may change the file.

        It may if it holds the run's lock, or writes into a draft that was made under the current lock: each rank of a
        job writes drafts over a connection of its own, and only one of these has the lock.
        """
        directory, _, name = asked.path.partition("/")
        with self._guard:
            is_holder, makes = self._writer is channel, asked.verb == "make_directory" and not name
            if makes and directory and (is_holder or (self._writer is not None and directory.startswith(SAVING))):
                self._drafts.add(directory)
                return
            if is_holder and asked.verb in ("remove", "rename") and not name:
                self._drafts.discard(directory)
            is_of_draft = bool(name) and asked.verb != "rename" and directory in self._drafts
        if not is_holder and not is_of_draft and asked != Ask("make_directory"):  # the root is made before it is locked
            raise OSError(errno.EPERM, f"only the holder of the run's lock may change {escaped(asked.path[:200])}")

    def lost_lock(self, channel: Channel) -> Told:
        with self._guard:
            return Told(yes=self._writer is channel, text=self._holder)

    # What is held

    def held(self) -> Held:
        """All of one instant, or less: what is removed meanwhile is left out."""
        tree = self.tree
        steps = {}
        with tree.acting():
            names = tree.names("")
            for name in names:
                if step_of(name) is not None and tree.exists(f"{name}/{MANIFEST_NAME}"):
                    files = {one: tree.look(f"{name}/{one}") for one in tree.names(name)}
                    steps[name] = HeldStep(self._manifest_digest(name, files[MANIFEST_NAME]), files)
            answer, _ = tree.client.ask(Request("agree"))
        return Held(answer.number, names, steps)

    def _manifest_digest(self, directory: str, looked: tuple[int, int]) -> str:
        number, size_bytes = looked
        if number not in self._manifests:
            file = self.tree.open(f"{directory}/{MANIFEST_NAME}")
            if len(self._manifests) > 1000:
                self._manifests.clear()
            self._manifests[number] = digest(file.read(0, min(size_bytes, MANIFEST_BYTES_MAX)))
        return self._manifests[number]


class Attendance:
    """What one client asks for. One thread."""

    def __init__(self, server: PeerServer, channel: Channel) -> None:
        self._server, self._channel, self._tree = server, channel, server.tree
        self._read: dict[int, MemoryFile] = {}
        self._created: dict[int, MemoryFile] = {}
        self._shares = Shares(server.parities, server.tree)

    def serve(self) -> None:
        """Until the client ends it. Raises EOFError, OSError, PeerError; MemoryAgentError once the agent is gone."""
        while True:
            asked = self._channel.receive(Ask)
            try:
                told = self._answer(asked)
            except FullError as error:
                told = Told(
                    errno=errno.ENOSPC, full=True, error=error.message, text=str(error.facts.get("needed", "")),
                    names=(str(error.facts.get("available", "")),),
                )
            except MemoryAgentError:
                raise
            except FlowstoneError as error:
                told = Told(errno=getattr(error, "errno", 0) or errno.EIO, error=error.message)
            except _RefusedError as error:
                told = Told(errno=error.errno or errno.EIO, error=error.strerror or str(error))
            if told is not None:
                self._channel.send(told)

    def _answer(self, asked: Ask) -> Told | None:
        """The answer; None: it was sent, with what follows it. Bytes that follow the request are taken in any case."""
        if asked.verb == "put":
            return self._put(asked)
        if asked.verb == "fill":
            return self._fill(asked)
        if asked.verb in ("gather", "add"):
            return self._add(asked)
        if asked.payload_bytes:
            raise PeerError("a peer sends bytes that nobody has asked for", next="use one release on all nodes")
        try:
            if asked.verb in _CHANGING:
                self._server.check_lock(self._channel, asked)
            if asked.verb in _FORWARDED:
                return self._forwarded(asked)
            if asked.verb == "held":
                return Told(held=self._server.held())
            if asked.verb == "create":
                file = self._tree.create(asked.path, asked.size_bytes)
                self._created[file.number] = file
                return Told(number=file.number)
            if asked.verb == "lock":
                return self._server.lock(self._channel, asked.text)
            if asked.verb == "unlock":
                self._server.unlock(self._channel)
                return Told()
            if asked.verb == "lost_lock":
                return self._server.lost_lock(self._channel)
            file = self._opened(asked)
        except OSError as error:
            raise _RefusedError(error.errno, error.strerror) from error
        length = max(0, min(asked.size_bytes, file.size_bytes - asked.offset))
        self._channel.send(Told(payload_bytes=length))
        self._channel.send_file(file.fd, asked.offset, length)
        return None

    def _forwarded(self, asked: Ask) -> Told:
        request = Request(
            asked.verb, asked.path, asked.target, number=asked.number, size_bytes=asked.size_bytes  # type: ignore[arg-type]
        )
        if asked.verb == "rename" and asked.path.startswith(SAVING) and step_of(asked.target) is not None:
            self._server.parities.check(asked.path)
        makes = asked.verb == "make_directory"
        with self._server.parities.renewing(asked.path) if makes else contextlib.nullcontext(), self._tree.acting():
            answer, _ = self._tree.client.ask(request)
        return Told(
            number=answer.number, size_bytes=answer.size_bytes, yes=answer.yes, text=answer.text, names=answer.names
        )

    def _opened(self, asked: Ask) -> MemoryFile:
        """The file to read: the one that had that number when it was looked for."""
        file = self._read.get(asked.number)
        if file is None:
            file = self._tree.open(asked.path)
            if file.number != asked.number:
                raise OSError(errno.ENOENT, "another file has that name now")
            if len(self._read) >= _OPEN_MAX:
                self._read.clear()
            self._read[asked.number] = file
        return file

    def _put(self, asked: Ask) -> Told:
        if asked.payload_bytes > PEER_PUT_BYTES_MAX:
            raise PeerError("a peer sends more than a small file has", found=f"{asked.payload_bytes} bytes",
                            next="use one release on all nodes")
        content = bytearray(asked.payload_bytes)
        self._channel.receive_into(memoryview(content))
        try:
            self._server.check_lock(self._channel, asked)
            self._tree.put(asked.path, bytes(content))
        except OSError as error:
            raise _RefusedError(error.errno, error.strerror) from error
        return Told()

    def _fill(self, asked: Ask) -> Told:
        """Bytes into a file that was created here, verified once they are there."""
        file = self._created.get(asked.number)
        end = asked.offset + asked.payload_bytes
        if file is None or asked.payload_bytes > PEER_PART_BYTES or not 0 <= asked.offset <= end <= file.size_bytes:
            raise PeerError("a peer sends bytes of no file", next="use one release on all nodes")
        mapping = file.mapped(writable=True)
        assert mapping is not None, "it has bytes"
        target = view_of(mapping.address + asked.offset, asked.payload_bytes)
        self._channel.receive_into(target)
        if digest(target) != asked.text:
            return Told(errno=errno.EBADMSG, error=f"bytes {asked.offset}..{end} arrived changed")
        return Told(yes=True)

    def _add(self, asked: Ask) -> Told:
        """A share of parity: first what it is, then its bytes."""
        is_first = asked.verb == "gather"
        if asked.payload_bytes > (PEER_DESCRIPTION_BYTES_MAX if is_first else PEER_PART_BYTES):
            raise PeerError("a peer sends more than belongs together", next="use one release on all nodes")
        if not is_first:
            self._shares.check(asked)
        content = bytearray(asked.payload_bytes)
        self._channel.receive_into(memoryview(content))
        try:
            if is_first:
                self._server.check_lock(self._channel, asked)
                return Told(number=self._shares.gather(asked, bytes(content)))
            self._shares.add(asked, content)
        except OSError as error:
            raise _RefusedError(error.errno, error.strerror) from error
        return Told(yes=True)


class _RefusedError(OSError):
    """The agent refuses: the client is told."""


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
