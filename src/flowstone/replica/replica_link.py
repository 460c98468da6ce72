"""The trainer's side of a replica: start the replica, report durable steps to it, and end it.

Training waits for the replica only when training ends. The replica's messages are read on the journal's thread,
whenever a step has become durable.

With several ranks, each starts a replica. Rank 0 listens at a port to which all replicas connect, and sends the port in
the agreement that begins a journal (journal_ranks.py). No rank waits for these connections.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
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
from flowstone.replica.replica_events import Replica, ReplicaBehind, ReplicaFollows, ReplicaLost
from flowstone.replica.replica_wire import (
    DurableStepMessage,
    Exactness,
    Farewell,
    ReplicaStatus,
    Setup,
    await_end,
    decode_status,
    encode,
    node_and_network,
    orphans,
    replica_status,
    socket_name,
)
from flowstone.session.shared import Shared
from flowstone.store.forks import forget_in_children
from flowstone.store.local import LocalStore
from flowstone.store.memory.local_sockets import agent_directory, open_directory

_FAREWELL_S = 1.0  # time limit for sending Farewell; without this message, a replica assumes that training was killed
_End = Callable[[BaseException | None], None]


class ReplicaLink:
    """The link to the replica of one Checkpointer. `end` runs on the caller's thread, and `notify` on the
    journal's. `start` runs on the caller's thread if there is one rank, otherwise on the journal's.
    """

    def __init__(self, shared: Shared, how: Replica) -> None:
        """Does not start the replica. Raises ArgumentError if the store is not a directory."""
        if not isinstance(shared.store, LocalStore):
            raise ArgumentError(
                f"every_step=Replica(...) with {shared.store.location}: a replica follows a journal in a directory",
                next="give the Checkpointer a path, or write every_step=True",
            )
        self._location, self._emit, self._engine, self._how = shared.store.location, shared.emit, shared.options, how
        self._rank, self._ranks = shared.group.rank, shared.group.size
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        # on rank 0: listens for all replicas until rank 0's replica has started
        self._listener: socket.socket | None = None
        self._port = 0  # the port to which the replicas of several ranks connect
        self._is_started = self._is_over = False
        self._told: Exactness | None = None
        self._is_behind = False
        forget_in_children(self)

    @property
    def node(self) -> str:
        """The name of the node of this rank's replica; rank 0 compares the names."""
        return node_and_network()

    def invite(self, nodes: Sequence[str]) -> tuple[int, str]:
        """On rank 0: returns the port to which the replicas will connect, and "". If they cannot connect, returns 0 and
        the reason.

        nodes  for each rank, the node of its replica; "": the rank has no replica
        """
        if "" in nodes:
            return 0, f"rank {nodes.index('')} has no replica: give every_step=Replica(...) on all ranks"
        if len({*nodes}) > 1:
            return 0, "the ranks are on several nodes, but all replicas must be on one node"
        if self._listener is None and not self._is_started:
            try:
                self._listener = socket.create_server(("127.0.0.1", 0), backlog=len(nodes))
            except OSError as error:
                return 0, f"rank 0 cannot listen for the other replicas: {error}"
            self._port = self._listener.getsockname()[1]
        return self._port, ""

    def set_meeting_port(self, port: int, why_not: str) -> None:
        """Note rank 0's answer to `invite`. The replica is started when the next step is durable."""
        if why_not and not self._is_started:
            self._is_started = True
            self._report_loss(why_not)
        self._port = port

    def start_alone(self) -> None:
        """Start the replica of a single rank. With several ranks, replicas wait for `set_meeting_port`."""
        if self._ranks == 1:
            self.start()

    def start(self) -> None:
        """Start the replica, unless it was started before. An error is reported as an event, and training continues."""
        if self._is_started:
            return
        self._is_started = True
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        listener, self._listener = self._listener, None
        passed = [theirs.fileno(), *([] if listener is None else [listener.fileno()])]
        setup = Setup(
            os.getpid(), self._location, self._how.build, self._how.tolerance, msgspec.to_builtins(self._engine),
            self._rank, self._ranks, self._port, -1 if listener is None else listener.fileno(),
        )
        self._link = own
        try:
            with theirs:
                own.send(encode(setup))
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "flowstone.replica", str(theirs.fileno())], stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self._environment(),
                    start_new_session=True, pass_fds=passed,
                )
        except OSError as error:
            self._report_loss(f"it could not be started: {error}")
        finally:
            if listener is not None:
                listener.close()

    def _environment(self) -> dict[str, str]:
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": "",
            "OMP_WAIT_POLICY": "passive",  # otherwise the replica's threads would spin on training's processors
        }
        if self._ranks > 1:
            environment = {
                "LOCAL_RANK": str(self._rank), "LOCAL_WORLD_SIZE": str(self._ranks), **environment,
                "RANK": str(self._rank), "WORLD_SIZE": str(self._ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port),
                # so that the replica's log has only errors
                "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            }
            environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the agent's store is for the trainers' ranks
        return environment

    def with_notification(self, step: int, journal: str | None, end: _End) -> _End:
        """A callback that calls `end`, and then reports a durable step to the replica."""

        def ended(failure: BaseException | None) -> None:
            end(failure)
            if failure is None:
                self.notify(step, journal or "")

        return ended

    def notify(self, step: int, journal: str) -> None:
        """Report a durable step to the replica, and read its status. Does not wait."""
        if self._port:
            self.start()
        if self._link is None:
            return
        try:
            self._link.send(encode(DurableStepMessage(step, journal)))
        except BlockingIOError:
            pass  # the replica is busy; the next message reports a later step
        except OSError:
            self._read_status(step)  # reads the status that the replica sent last
            self._report_loss("it has ended")
            return
        self._read_status(step)

    def _read_status(self, newest: int) -> None:
        status = self._newest_status()
        if status is None:
            return
        if status.does == "failed":
            self._report_loss(status.reason)
            return
        if status.step >= 0 and status.exactness != self._told:
            self._told = status.exactness
            if status.exactness == "tolerance":
                log.warning("the replica of %s differs from the trainer in some bits, from step %s on", self._location,
                            status.differs_from if status.differs_from is not None else status.step)
            self._emit(ReplicaFollows(status.step, status.exactness, status.differs_from))
        lag = newest - status.step if status.step >= 0 else 0
        if lag > REPLICA_BEHIND_STEPS and not self._is_behind:
            log.warning(
                "the replica of %s is behind: it is at step %d, the trainer at step %d",
                self._location, status.step, newest,
            )
            self._emit(ReplicaBehind(status.step, newest))
        self._is_behind = lag > (REPLICA_BEHIND_STEPS // 2 if self._is_behind else REPLICA_BEHIND_STEPS)

    def _newest_status(self) -> ReplicaStatus | None:
        """The replica's newest unread status; None if there is none."""
        status = None
        with suppress(BlockingIOError):
            while self._link is not None:
                try:
                    data = self._link.recv(AGENT_MESSAGE_BYTES_MAX)
                    status = decode_status(data) if data else status
                except (ConnectionError, msgspec.DecodeError):
                    data = b""
                if not data:
                    break
        if status is None and self._link is not None and self._process is not None and self._process.poll() is not None:
            self._report_loss(f"it has ended, with status {self._process.returncode}")
        return status

    def _report_loss(self, reason: str) -> None:
        """Report, once, that the replica is lost."""
        link, self._link = self._link, None
        if self._is_over:
            return
        self._is_over = True
        if link is not None:
            link.close()
        log.warning("there is no replica of %s any more: %s", self._location, reason)
        self._emit(ReplicaLost(reason))

    def forget(self) -> None:
        """Called in a forked child: drop the sockets, which the parent uses."""
        owned, self._link, self._listener, self._process = (self._link, self._listener), None, None, None
        self._is_started = self._is_over = True
        for owned_socket in filter(None, owned):
            owned_socket.close()

    def end(self) -> None:
        """After training has finished: end the replica, and remove its files.

        With several ranks, if other ranks were killed, all replicas continue after this rank's end, and save the newest
        step.
        """
        link, process = self._link, self._process
        if self._listener is not None:
            self._listener.close()
        if link is not None:
            self._newest_status()
        self._is_over, may_stay = True, False
        if self._link is not None:
            self._link.settimeout(_FAREWELL_S)
            with suppress(OSError):  # the replica has ended, or is stopped; the code below kills a stopped one
                self._link.send(encode(Farewell()))
            if process is not None and self._ranks > 1:
                may_stay = self._await_others(self._link, process)
            self._link.close()
            self._link = None
        if process is None or may_stay:
            return
        try:
            process.wait(REPLICA_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _remove_socket(self._location, self._rank)

    def _await_others(self, link: socket.socket, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the replica has ended, or reports that other ranks were killed. Returns whether it continues."""
        deadline, has_heard = time.monotonic() + REPLICA_END_S, False
        while (left := deadline - time.monotonic()) > 0 and select.select([link], [], [], left)[0]:
            try:
                data = link.recv(AGENT_MESSAGE_BYTES_MAX)
                status = decode_status(data) if data else None
            except (OSError, msgspec.DecodeError):
                status = None
            if status is None:
                return False
            has_heard = has_heard or status.has_ended
            if status.is_orphaned:
                return True
        return has_heard and process.poll() is None


def _remove_socket(location: str, rank: int) -> None:
    """Remove a killed replica's socket and log file; a log with errors stays."""
    if replica_status(location, rank) is not None:
        return
    directory = open_directory(agent_directory(), create=False)
    if directory is None:
        return
    name = socket_name(location, rank)
    log_name = f"{name.removesuffix('.sock')}.log"
    with suppress(OSError):  # it was removed before, or the next replica removes it
        os.unlink(name, dir_fd=directory)
    with suppress(OSError):  # safe: the next replica empties the log
        if not os.stat(log_name, dir_fd=directory, follow_symlinks=False).st_size:
            os.unlink(log_name, dir_fd=directory)
    with suppress(OSError):  # another replica may still use the directory
        os.rmdir(agent_directory())
    os.close(directory)


def create_replica_link(shared: Shared, how: object) -> ReplicaLink | None:
    """The link to a replica; None unless `how` is a Replica. Waits while the replicas of a killed training save."""
    link = ReplicaLink(shared, how) if isinstance(how, Replica) else None
    _await_replicas_of_the_dead(shared)
    return link


def _await_replicas_of_the_dead(shared: Shared) -> None:
    """On each rank: wait until the replicas of a killed training have saved. Only then may a rank read the store."""
    if not isinstance(shared.store, LocalStore):
        return
    location, deadline = shared.store.location, time.monotonic() + REPLICA_PERSIST_S
    for status in orphans(location):
        log.info("waiting for the replica (process %d) to save step %d", status.pid, status.step)
        if not await_end(location, max(deadline - time.monotonic(), 0.0), status.rank):
            log.warning("the replica (process %d) did not end within %.0f s", status.pid, REPLICA_PERSIST_S)
