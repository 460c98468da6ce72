"""The agent's one thread: connections, the ends of jobs, flushes, and its own end.

Each request is answered at once. A client that does not take its answer is cut off, so none can make it wait.
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

from flowstone.agent.runs import Run, Runs
from flowstone.agent.serving import Serving
from flowstone.agent.sessions import RefusedError, Session
from flowstone.config import AGENT_CONNECTIONS_MAX, AGENT_IDLE_S, AGENT_MESSAGE_BYTES_MAX, FLUSH_TRIES
from flowstone.runtime import time_slice
from flowstone.store.agent_wire import Answer, Copied, Request, RunStatus, decode_request, encode
from flowstone.store.local_sockets import DIRECTORY_VARIABLE, peer, receive, send
from flowstone.store.mount import available_bytes

_TICK_S = 0.5  # what is due by the clock is looked at so often


class Flush(msgspec.Struct, eq=False):
    """A flush of one run: a child process under way, or the next try of it.

    newest, rewinds  of the run, when the child was started
    """

    run: Run
    tries: int = 0
    due: float = 0.0
    newest: tuple[int, str] = (-1, "")
    rewinds: int = 0
    child: subprocess.Popen[bytes] | None = None
    gone: int = -1  # readable once the child has ended


class Server:
    """Serves what connects to `listener`, until nothing is held and nothing is connected, or until SIGTERM.

    directory  where it listens: its children look there
    idle_s     how long it waits for something to hold
    """

    def __init__(self, listener: socket.socket, directory: Path, idle_s: float = AGENT_IDLE_S) -> None:
        self._listener, self._directory, self._idle_s = listener, directory, idle_s
        self._selector = selectors.DefaultSelector()
        self._runs = Runs(available_bytes)
        self._sessions: dict[socket.socket, Session] = {}
        self._deaths: dict[int, Session] = {}  # by a descriptor that is readable once the client's process is dead
        self._flushes: dict[str, Flush] = {}  # by the run's name
        self._servings: dict[str, Serving] = {}  # likewise
        self._node = secrets.token_hex(8)  # tells this node apart from others
        self._last_used: dict[str, float] = {}
        self._used = time.monotonic()
        self._is_ending = False

    def serve(self) -> None:
        """Returns at its end."""
        time_slice.shorten()  # who asks is in `save`, on a machine that trains
        self._listener.setblocking(False)
        woken, waker = socket.socketpair()
        woken.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._begin_to_end())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        while not self._is_done():
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is woken:
                    woken.recv(1000)
                elif self._selector.get_map().get(key.fd) is key:  # else one before it has ended it
                    self._take(key)
            self._do_what_is_due()
        for session in tuple(self._sessions.values()):
            self._end(session)
        for name in tuple(self._servings):
            self._end_serving(name)

    def _take(self, key: selectors.SelectorKey) -> None:
        """A request, or the end of a process."""
        if isinstance(key.fileobj, socket.socket):
            self._serve(self._sessions[key.fileobj])
        elif key.fd in self._deaths:
            self._end(self._deaths[key.fd])
        elif serving := next((one for one in self._servings.values() if one.told == key.fd), None):
            if not serving.hear():
                self._end_serving(serving.run)
        else:
            self._end_flush(next(flush for flush in self._flushes.values() if flush.gone == key.fd))

    # Connections

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has gone, or descriptors are short: it is asked again
        connection.setblocking(False)
        pid, uid = peer(connection)
        refusal = ""
        if uid != os.geteuid():
            refusal = f"this agent is of user {os.geteuid()}, not of {uid}"
        elif len(self._sessions) >= AGENT_CONNECTIONS_MAX:
            refusal = f"{len(self._sessions)} processes are connected already"
        if refusal:
            self._say(connection, Answer(errno=errno.EACCES, error=refusal))
            connection.close()
            return
        session = Session(connection, pid, self._runs, self)
        self._sessions[connection] = session
        self._selector.register(connection, selectors.EVENT_READ)
        if pid:  # 0: it is not to be seen from here, and its connection alone tells its end
            try:
                gone = os.pidfd_open(pid)
            except OSError:
                return  # dead already: its connection tells
            self._deaths[gone] = session
            self._selector.register(gone, selectors.EVENT_READ)

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
            self._say(session.connection, Answer(errno=errno.EINVAL, error="this is no request"))
            self._end(session)
            return
        self._used = time.monotonic()
        if session.run is not None:
            self._last_used[session.run.name] = self._used
        try:
            answer, passed = session.answer(request, fds)
        except RefusedError as refusal:
            self._say(session.connection, refusal.answer)
            self._end(session)
            return
        except Exception:  # a mistake in here must not cost the memory of all jobs: that connection alone ends
            traceback.print_exc()
            self._end(session)
            return
        try:
            if not self._say(session.connection, answer, passed):
                self._end(session)
        finally:
            if passed is not None:
                os.close(passed)

    def _say(self, connection: socket.socket, answer: Answer, fd: int | None = None) -> bool:
        """Whether the client has it."""
        data = encode(answer)
        if len(data) > AGENT_MESSAGE_BYTES_MAX:
            data, fd = encode(Answer(errno=errno.EMSGSIZE, error="an answer that is too long")), None
        try:
            send(connection, data, fd)
        except OSError:
            return False
        return True

    def _end(self, session: Session) -> None:
        """The client is gone. With the last one that writes its drafts go, and what is complete is made durable."""
        if self._sessions.pop(session.connection, None) is None:
            return
        self._selector.unregister(session.connection)
        session.connection.close()
        for gone in [gone for gone, other in self._deaths.items() if other is session]:
            self._selector.unregister(gone)
            os.close(gone)
            del self._deaths[gone]
        session.end()
        self._used = time.monotonic()
        run = session.run
        if run is None:
            return
        self._last_used[run.name] = self._used
        if session.writes and not self._is_server(session) and not self._is_written(run):
            run.sweep()
            self.flush(run)
        if not run.contents.exists() and not self._is_used(run):
            self._drop(run)

    def _is_written(self, run: Run) -> bool:
        return any(one.writes and one.run is run and not self._is_server(one) for one in self._sessions.values())

    def _is_used(self, run: Run) -> bool:
        users = (session for session in self._sessions.values() if not self._is_server(session))
        return run.name in self._flushes or any(session.run is run for session in users)

    def _drop(self, run: Run) -> None:
        if run in self._runs:  # its server's session ends after it
            self._end_serving(run.name)
            self._runs.drop(run)

    # Other nodes

    def serve_run(self, run: Run, request: Request) -> str:
        """See Duties."""
        serving = self._servings.get(run.name)
        if serving is None:
            serving = self._servings[run.name] = Serving(run.name, self._directory, self._node, request)
            self._selector.register(serving.told, selectors.EVENT_READ)
        serving.check(request)
        return serving.port

    def _end_serving(self, name: str) -> None:
        serving = self._servings.pop(name, None)
        if serving is not None:
            self._selector.unregister(serving.told)
            serving.end()

    def _is_server(self, session: Session) -> bool:
        """Whether it is a child's that serves other nodes: what is kept, and for how long, does not depend on it."""
        return any(serving.child.pid == session.pid for serving in self._servings.values())

    def statuses(self) -> tuple[RunStatus, ...]:
        """What is held: of at most a hundred runs."""
        jobs = Counter(session.run.name for session in self._sessions.values() if session.run is not None)
        held = [run for run in self._runs if run.contents.exists()][:100]
        return tuple(run.status(jobs[run.name], is_flushing=run.name in self._flushes) for run in held)

    # Flushes

    def flush(self, run: Run) -> bool:
        """Begin to make the newest checkpoint durable, unless it is; whether that is under way."""
        if not run.flush_to or not run.steps() or run.is_flushed():
            return run.name in self._flushes
        flush = self._flushes.get(run.name)
        if flush is None or flush.child is None:
            flush, run.flush_error = Flush(run), ""
            self._flushes[run.name] = flush
            self._begin_flush(flush)
        return True

    def _begin_flush(self, flush: Flush) -> None:
        """By a child, so that what happens to it does not happen to the memory."""
        flush.tries += 1
        flush.newest, flush.rewinds = flush.run.newest(), flush.run.rewinds
        command = [sys.executable, "-P", "-m", "flowstone.agent.flush", flush.run.name, flush.run.flush_to]
        environment = {**os.environ, DIRECTORY_VARIABLE: str(self._directory)}
        try:
            flush.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            )
            flush.gone = os.pidfd_open(flush.child.pid)
        except OSError as error:
            self._try_again(flush, str(error))
            return
        self._selector.register(flush.gone, selectors.EVENT_READ)

    def _end_flush(self, flush: Flush) -> None:
        assert flush.child is not None, "it has begun"
        self._selector.unregister(flush.gone)
        os.close(flush.gone)
        said, told = flush.child.communicate()  # does not block: the child has ended, and its output is short
        status, flush.child, flush.gone = flush.child.returncode, None, -1
        run = flush.run
        self._used = self._last_used[run.name] = time.monotonic()
        if status != 0:
            self._try_again(flush, told.decode(errors="replace").strip()[-500:] or f"it ended with status {status}")
            return
        try:
            copied = msgspec.json.decode(said, type=Copied)
        except msgspec.DecodeError:
            self._try_again(flush, "it ended without reporting which step is durable")
            return
        run.flushed_step, run.flushed_id = copied.step, copied.id
        newest = run.newest()
        if copied.skipped_reason or ((copied.step, copied.id) != newest == flush.newest):
            older = f"step {copied.step} is durable, the newest step {newest[0]} is not"
            self._try_again(flush, copied.skipped_reason or older)
            return
        run.flushed_rewinds, run.flush_error = flush.rewinds, ""
        del self._flushes[run.name]
        if not self._is_written(run) or run.rewinds != run.flushed_rewinds:
            self.flush(run)  # a checkpoint or rewind since that flush began

    def _try_again(self, flush: Flush, error: str) -> None:
        flush.run.flush_error = error
        print(f"flush of memory://{flush.run.name} to {flush.run.flush_to}: {error}", file=sys.stderr, flush=True)
        if flush.tries >= FLUSH_TRIES:
            del self._flushes[flush.run.name]
        else:
            flush.due = time.monotonic() + 2.0 ** (flush.tries - 1)

    # What is due

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for flush in tuple(self._flushes.values()):
            if flush.child is None and now >= flush.due:
                self._begin_flush(flush)
        for run in self._runs:
            if self._is_used(run):
                self._last_used[run.name] = now
            elif now - self._last_used.get(run.name, now) > run.linger_s:
                self._drop(run)

    def _begin_to_end(self) -> None:
        """What is to be durable still becomes so; then it ends, whatever is connected."""
        if not self._is_ending:
            self._is_ending = True
            for run in self._runs:
                self.flush(run)

    def _is_done(self) -> bool:
        if self._flushes:
            return False
        is_idle = all(map(self._is_server, self._sessions.values())) and not any(True for _ in self._runs)
        return self._is_ending or (is_idle and time.monotonic() - self._used > self._idle_s)
