"""The replica of a training's state, as training sees it: it is started, told of durable steps, and told farewell.

Nothing here waits for it, but its end. What it says is heard when a step has become durable, on the journal's thread.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from flowstone.config import (
    AGENT_MESSAGE_BYTES_MAX,
    REPLICA_BEHIND_STEPS,
    REPLICA_END_S,
    REPLICA_PERSIST_S,
)
from flowstone.errors import ArgumentError
from flowstone.log import log
from flowstone.pipeline.shared import Shared
from flowstone.state_replica import Replica, ReplicaBehind, ReplicaFollows, ReplicaLost
from flowstone.store.agent_wire import agent_directory, open_directory
from flowstone.store.forks import forget_in_children
from flowstone.store.local import LocalStore
from flowstone.store.replica_wire import (
    Exactness,
    Farewell,
    Noted,
    ReplicaStatus,
    Setup,
    await_end,
    decode_status,
    encode,
    socket_name,
    status_of,
)

_FAREWELL_S = 1.0  # for it to hear what it was told before; one that hears no farewell takes training for dead
_End = Callable[[BaseException | None], None]


class ReplicaLink:
    """The replica of one Checkpointer. `start` and `end` on the caller's thread, `note` on the journal's."""

    def __init__(self, shared: Shared, how: Replica) -> None:
        """Starts nothing yet.

        raises  ArgumentError  several ranks; a store that is no directory
        """
        if shared.group.size > 1:
            raise ArgumentError(
                f"every_step=Replica(...) in a job of {shared.group.size} ranks: a replica follows a single one",
                next="write every_step=True: the journal of several ranks is replayed by load",
            )
        if not isinstance(shared.store, LocalStore):
            raise ArgumentError(
                f"every_step=Replica(...) with {shared.store.location}: a replica follows a journal in a directory",
                next="give the Checkpointer a path, or write every_step=True",
            )
        self._location, self._emit, self._engine, self._how = shared.store.location, shared.emit, shared.options, how
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._is_started = False
        self._told: Exactness | None = None
        self._is_behind = False
        forget_in_children(self)

    def start(self) -> None:
        """Start it, once. What goes wrong is told, and training goes on."""
        if self._is_started:
            return
        self._is_started = True
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": "",
            "OMP_WAIT_POLICY": "passive",  # else its threads spin on the processors on which training runs
        }
        setup = Setup(os.getpid(), self._location, self._how.build, self._how.tolerance,
                      msgspec.to_builtins(self._engine))
        self._link = own
        try:
            with theirs:
                own.send(encode(setup))
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "flowstone.replica", str(theirs.fileno())], stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
                    pass_fds=[theirs.fileno()],
                )
        except OSError as error:
            self._lose(f"it could not be started: {error}")

    def noting(self, step: int, journal: str | None, end: _End) -> _End:
        """`end`, which then tells the replica of a durable step."""

        def ended(failure: BaseException | None) -> None:
            end(failure)
            if failure is None:
                self.note(step, journal or "")

        return ended

    def note(self, step: int, journal: str) -> None:
        """Tell it of a durable step, and hear what it has told. Waits for nothing."""
        if self._link is None:
            return
        try:
            self._link.send(encode(Noted(step, journal)))
        except BlockingIOError:
            pass  # safe: it is busy, and the next one tells all that this would
        except OSError:
            self._hear(step)  # what it has said before it ended
            self._lose("it has ended")
            return
        self._hear(step)

    def _hear(self, newest: int) -> None:
        status = self._newest_status()
        if status is None:
            return
        if status.does == "failed":
            self._lose(status.reason)
            return
        if status.step >= 0 and status.exactness != self._told:
            self._told = status.exactness
            if status.exactness == "tolerance":
                log.warning("the replica of %s is not bit for bit what is trained, from step %s on", self._location,
                            status.differs_from if status.differs_from is not None else status.step)
            self._emit(ReplicaFollows(status.step, status.exactness, status.differs_from))
        lag = newest - status.step if status.step >= 0 else 0
        if lag > REPLICA_BEHIND_STEPS and not self._is_behind:
            log.warning("the replica of %s is at step %d, and training at %d", self._location, status.step, newest)
            self._emit(ReplicaBehind(status.step, newest))
        self._is_behind = lag > (REPLICA_BEHIND_STEPS // 2 if self._is_behind else REPLICA_BEHIND_STEPS)

    def _newest_status(self) -> ReplicaStatus | None:
        """The last thing that it has said since this was called; None if nothing."""
        found = None
        with suppress(BlockingIOError):
            while self._link is not None:
                try:
                    data = self._link.recv(AGENT_MESSAGE_BYTES_MAX)
                    found = decode_status(data) if data else found
                except (ConnectionError, msgspec.DecodeError):
                    data = b""
                if not data:
                    break
        if found is None and self._link is not None and self._process is not None and self._process.poll() is not None:
            self._lose(f"it has ended, with status {self._process.returncode}")
        return found

    def _lose(self, reason: str) -> None:
        """Tell of it, once."""
        link, self._link = self._link, None
        if link is None:
            return
        link.close()
        log.warning("there is no replica of %s any more: %s", self._location, reason)
        self._emit(ReplicaLost(reason))

    def forget(self) -> None:
        """In a forked child: the socket is the parent's."""
        link, self._link, self._process = self._link, None, None
        if link is not None:
            link.close()

    def end(self) -> None:
        """Training ends in order: so does the replica. Nothing of it is left then."""
        link, process = self._link, self._process
        if link is not None:
            self._newest_status()
        if self._link is not None:
            self._link.settimeout(_FAREWELL_S)
            with suppress(OSError):  # it has ended, or is stopped: it is awaited below
                self._link.send(encode(Farewell()))
            self._link.close()
            self._link = None
        if process is None:
            return
        try:
            process.wait(REPLICA_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _remove_socket(self._location)


def _remove_socket(location: str) -> None:
    """What a replica that was killed has left, but a log that says something; one that ended has removed its own."""
    if status_of(location) is not None:
        return
    directory = open_directory(agent_directory(), create=False)
    if directory is None:
        return
    name = socket_name(location)
    log_name = f"{name.removesuffix('.sock')}.log"
    with suppress(OSError):  # safe: it is gone, or the next replica removes it
        os.unlink(name, dir_fd=directory)
    with suppress(OSError):  # safe: a log, which the next replica begins anew
        if not os.stat(log_name, dir_fd=directory, follow_symlinks=False).st_size:
            os.unlink(log_name, dir_fd=directory)
    with suppress(OSError):  # safe: others use it
        os.rmdir(agent_directory())
    os.close(directory)


def link_of(shared: Shared, how: object) -> ReplicaLink | None:
    """To a replica, if `how` is one. What that of a training that was killed makes durable is durable on return."""
    link = ReplicaLink(shared, how) if isinstance(how, Replica) else None
    _await_replica_of_the_dead(shared)
    return link


def _await_replica_of_the_dead(shared: Shared) -> None:
    if not isinstance(shared.store, LocalStore) or shared.group.rank:
        return
    status = status_of(shared.store.location)
    if status is None or not status.is_orphaned:
        return
    log.info("waiting for the replica (process %d), which saves step %d", status.pid, status.step)
    if not await_end(shared.store.location, REPLICA_PERSIST_S):
        log.warning("the replica (process %d) has not ended after %.0f s", status.pid, REPLICA_PERSIST_S)
