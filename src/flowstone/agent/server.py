"""The only thread of the agent. It serves connections, notices when jobs end, starts flushes, and ends the agent.

Each request is answered immediately. A client that does not read its answer is disconnected, so that it cannot block
other clients.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import msgspec

from flowstone.agent.runs import MemoryRun, MemoryRuns
from flowstone.agent.serving import RunServer
from flowstone.agent.sessions import RefusedError, Session
from flowstone.config import AGENT_CONNECTIONS_MAX, AGENT_IDLE_S, AGENT_MESSAGE_BYTES_MAX, FLUSH_ATTEMPTS
from flowstone.runtime.interpreter import request_short_slice
from flowstone.store.memory.agent_wire import (
    AgentRequest,
    AgentResponse,
    FlushResult,
    RunStatus,
    decode_request,
    encode,
)
from flowstone.store.memory.local_sockets import DIRECTORY_VARIABLE, peer_credentials, receive, send
from flowstone.store.mount import available_bytes

_TICK_S = 0.5  # seconds between two checks for work that is due


class Flush(msgspec.Struct, eq=False):
    """A flush of one run: either a child process is running, or the next attempt waits for its time.

    newest, rewinds  the run's newest checkpoint and number of rewinds when the child was started
    due              when the next attempt starts, on the monotonic clock
    """

    run: MemoryRun
    tries: int = 0
    due: float = 0.0
    newest: tuple[int, str] = (-1, "")
    rewinds: int = 0
    child: subprocess.Popen[bytes] | None = None
    gone: int = -1  # a pidfd, which becomes readable once the child has ended

    def start(self, directory: Path) -> None:
        """Start the child process. It is a separate process, so that a crash does not lose the agent's memory.
        `directory`: where the agent listens. Raises OSError.
        """
        self.tries += 1
        self.newest, self.rewinds = self.run.newest(), self.run.rewinds
        command = [sys.executable, "-P", "-m", "flowstone.agent.flush", self.run.name, self.run.flush_to]
        self.child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, DIRECTORY_VARIABLE: str(directory)},
        )
        self.gone = os.pidfd_open(self.child.pid)

    def end(self) -> tuple[int, bytes, bytes]:
        """After the child has ended: returns its exit status, its output, and its error messages."""
        assert self.child is not None, "the child was started"
        os.close(self.gone)
        # does not block, since the child has ended, and its output is short
        output, messages = self.child.communicate()
        status, self.child, self.gone = self.child.returncode, None, -1
        return status, output, messages

    def delay(self) -> None:
        """Set the time of the next attempt. The delay doubles with each attempt."""
        self.due = time.monotonic() + 2.0 ** (self.tries - 1)


class Server:
    """Serves clients of the socket `listener`. Ends when the agent has no run and no client is connected, or on
    SIGTERM.

    directory  where the agent listens; its child processes connect there
    idle_s     how many seconds the agent waits before it ends, while it has no run
    """

    def __init__(self, listener: socket.socket, directory: Path, idle_s: float = AGENT_IDLE_S) -> None:
        self._listener, self._directory, self._idle_s = listener, directory, idle_s
        self._selector = selectors.DefaultSelector()
        self._runs = MemoryRuns(available_bytes)
        self._sessions: dict[socket.socket, Session] = {}
        # a pidfd, which is readable once the client's process has died -> the client's session
        self._deaths: dict[int, Session] = {}
        self._flushes: dict[str, Flush] = {}  # name of a run -> its flush
        self._servings: dict[str, RunServer] = {}  # name of a run -> the child that serves it to other nodes
        self._node = secrets.token_hex(8)  # identifies this node to other nodes
        self._last_used: dict[str, float] = {}
        self._used = time.monotonic()
        self._is_ending = False

    def serve(self) -> None:
        """Serve until the agent ends."""
        request_short_slice()  # clients wait inside `save`, on a machine that trains
        self._listener.setblocking(False)
        woken, waker = socket.socketpair()
        woken.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._begin_shutdown())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        while not self._is_done():
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is woken:
                    woken.recv(1000)
                elif self._selector.get_map().get(key.fd) is key:  # else an earlier event has closed this connection
                    self._handle(key)
            self._start_due_work()
        for session in tuple(self._sessions.values()):
            self._end(session)
        for name in tuple(self._servings):
            self._end_serving(name)

    def _handle(self, key: selectors.SelectorKey) -> None:
        """Handle an event: a request, or the end of a process."""
        if isinstance(key.fileobj, socket.socket):
            self._serve(self._sessions[key.fileobj])
        elif key.fd in self._deaths:
            self._end(self._deaths[key.fd])
        elif serving := next((child for child in self._servings.values() if child.output_fd == key.fd), None):
            if not serving.read_port():
                self._end_serving(serving.run)
        else:
            self._end_flush(next(flush for flush in self._flushes.values() if flush.gone == key.fd))

    # Connections

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # the client has closed, or no descriptor is free: the next turn tries again
        connection.setblocking(False)
        pid, uid = peer_credentials(connection)
        refusal = ""
        if uid != os.geteuid():
            refusal = f"this agent belongs to user {os.geteuid()}, not to user {uid}"
        elif len(self._sessions) >= AGENT_CONNECTIONS_MAX:
            refusal = f"{len(self._sessions)} processes are connected already"
        if refusal:
            self._send(connection, AgentResponse(errno=errno.EACCES, error=refusal))
            connection.close()
            return
        session = Session(connection, pid, self._runs, self)
        self._sessions[connection] = session
        self._selector.register(connection, selectors.EVENT_READ)
        if pid:  # pid 0: the process is in another namespace, so only its connection shows when it ends
            try:
                process_fd = os.pidfd_open(pid)
            except OSError:
                return  # the process has died already, so its connection will end, too
            self._deaths[process_fd] = session
            self._selector.register(process_fd, selectors.EVENT_READ)

    def _serve(self, session: Session) -> None:
        try:
            data, fds = receive(session.connection)
        except BlockingIOError:
            return
        except OSError:
            self._end(session)
            return
        if not data:
            for fd in fds:
                os.close(fd)
            self._end(session)
            return
        try:
            request = decode_request(data)
        except msgspec.DecodeError:
            for fd in fds:
                os.close(fd)
            self._send(
                session.connection, AgentResponse(errno=errno.EINVAL, error="the message is not a valid request")
            )
            self._end(session)
            return
        self._used = time.monotonic()
        if session.run is not None:
            self._last_used[session.run.name] = self._used
        try:
            answer, passed = session.answer(request, fds)
        except RefusedError as refusal:
            self._send(session.connection, refusal.answer)
            self._end(session)
            return
        except Exception:  # a bug here must not lose the memory of all jobs, so only this connection ends
            traceback.print_exc()
            self._end(session)
            return
        try:
            if not self._send(session.connection, answer, passed):
                self._end(session)
        finally:
            if passed is not None:
                os.close(passed)

    def _send(self, connection: socket.socket, answer: AgentResponse, fd: int | None = None) -> bool:
        """Send the answer. Returns False if the client does not read it."""
        data = encode(answer)
        if len(data) > AGENT_MESSAGE_BYTES_MAX:
            data, fd = encode(AgentResponse(errno=errno.EMSGSIZE, error="the answer is too long")), None
        try:
            send(connection, data, fd)
        except OSError:
            return False
        return True

    def _end(self, session: Session) -> None:
        """End a client's session. If no other client writes, unfinished checkpoints are removed, and the newest
        complete one is flushed.
        """
        if self._sessions.pop(session.connection, None) is None:
            return
        self._selector.unregister(session.connection)
        session.connection.close()
        for process_fd in [process_fd for process_fd, other in self._deaths.items() if other is session]:
            self._selector.unregister(process_fd)
            os.close(process_fd)
            del self._deaths[process_fd]
        session.end()
        self._used = time.monotonic()
        run = session.run
        if run is None:
            return
        self._last_used[run.name] = self._used
        if session.writes and not self._is_server(session) and not self._is_written(run):
            run.remove_drafts()
            self.flush(run)
        if not run.contents.exists() and not self._is_used(run):
            self._drop(run)

    def _is_written(self, run: MemoryRun) -> bool:
        sessions = (session for session in self._sessions.values() if session.run is run)
        return any(session.writes and not self._is_server(session) for session in sessions)

    def _is_used(self, run: MemoryRun) -> bool:
        users = (session for session in self._sessions.values() if not self._is_server(session))
        return run.name in self._flushes or any(session.run is run for session in users)

    def _drop(self, run: MemoryRun) -> None:
        if run in self._runs:  # else the run was dropped before its server's session ended
            self._end_serving(run.name)
            self._runs.drop(run)

    # Other nodes

    def serve_run(self, run: MemoryRun, request: AgentRequest) -> str:
        """Serve the run to other nodes, by a child process. Returns the child's port; "" until it is known."""
        serving = self._servings.get(run.name)
        if serving is None:
            serving = self._servings[run.name] = RunServer(run.name, self._directory, self._node, request)
            self._selector.register(serving.output_fd, selectors.EVENT_READ)
        serving.check(request)
        return serving.port

    def _end_serving(self, name: str) -> None:
        serving = self._servings.pop(name, None)
        if serving is not None:
            self._selector.unregister(serving.output_fd)
            serving.end()

    def _is_server(self, session: Session) -> bool:
        """Whether the client is the child that serves other nodes. Such a client does not count as a user of the run.
        """
        return any(serving.child.pid == session.pid for serving in self._servings.values())

    def statuses(self) -> tuple[RunStatus, ...]:
        """The status of each run; of the first 100, if there are more."""
        jobs = Counter(session.run.name for session in self._sessions.values() if session.run is not None)
        runs = [run for run in self._runs if run.contents.exists()][:100]
        return tuple(run.status(jobs[run.name], is_flushing=run.name in self._flushes) for run in runs)

    # Flushes

    def flush(self, run: MemoryRun) -> bool:
        """Start to flush the newest checkpoint, unless it is durable already. Returns whether a flush is running."""
        if not run.flush_to or not run.steps() or run.is_flushed():
            return run.name in self._flushes
        flush = self._flushes.get(run.name)
        if flush is None or flush.child is None:
            run.begin_flush()
            flush = self._flushes[run.name] = Flush(run)
            self._begin_flush(flush)
        return True

    def _begin_flush(self, flush: Flush) -> None:
        """Start the flush in a child process, so that a crash does not lose the agent's memory."""
        try:
            flush.start(self._directory)
        except OSError as error:
            self._try_again(flush, str(error))
            return
        self._selector.register(flush.gone, selectors.EVENT_READ)

    def _end_flush(self, flush: Flush) -> None:
        self._selector.unregister(flush.gone)
        status, output, messages = flush.end()
        run = flush.run
        self._used = self._last_used[run.name] = time.monotonic()
        if status != 0:
            text = messages.decode(errors="replace").strip()[-500:]
            self._try_again(flush, text or f"the flush ended with status {status}")
            return
        try:
            copied = msgspec.json.decode(output, type=FlushResult)
        except msgspec.DecodeError:
            self._try_again(flush, "the flush ended without reporting which step is durable")
            return
        run.note_durable(copied.step, copied.id)
        newest = run.newest()
        if copied.skipped_reason or ((copied.step, copied.id) != newest == flush.newest):
            older = f"step {copied.step} is durable, the newest step {newest[0]} is not"
            self._try_again(flush, copied.skipped_reason or older)
            return
        run.end_flush(flush.rewinds)
        del self._flushes[run.name]
        if not self._is_written(run) or run.rewinds != run.flushed_rewinds:
            self.flush(run)  # flushes again if there is a newer checkpoint or rewind

    def _try_again(self, flush: Flush, error: str) -> None:
        flush.run.note_flush_error(error)
        print(f"flush of memory://{flush.run.name} to {flush.run.flush_to}: {error}", file=sys.stderr, flush=True)
        if flush.tries >= FLUSH_ATTEMPTS:
            del self._flushes[flush.run.name]
        else:
            flush.delay()

    # Work that is due

    def _start_due_work(self) -> None:
        """Start flushes that are due, and drop runs that no process has used for `linger_s`."""
        now = time.monotonic()
        for flush in tuple(self._flushes.values()):
            if flush.child is None and now >= flush.due:
                self._begin_flush(flush)
        for run in self._runs:
            if self._is_used(run):
                self._last_used[run.name] = now
            elif now - self._last_used.get(run.name, now) > run.linger_s:
                self._drop(run)

    def _begin_shutdown(self) -> None:
        """Flush all runs, then end, even if clients are connected."""
        if not self._is_ending:
            self._is_ending = True
            for run in self._runs:
                self.flush(run)

    def _is_done(self) -> bool:
        if self._flushes:
            return False
        is_idle = all(map(self._is_server, self._sessions.values())) and not any(True for _ in self._runs)
        return self._is_ending or (is_idle and time.monotonic() - self._used > self._idle_s)
