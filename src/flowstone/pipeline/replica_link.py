"""The replica of a training's state, as training sees it: it is started, told of durable steps, and told farewell.

Nothing here waits for it, but its end. What it says is heard when a step has become durable, on the journal's thread.

Of several ranks each starts one. Rank 0 listens for them, where they will meet, and says where with the agreement by
which the ranks begin a journal (journal_ranks.py); none of them waits for the replicas to meet.
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
from flowstone.pipeline.journal_ranks import JournalRanks
from flowstone.pipeline.shared import Shared
from flowstone.state_replica import Replica, ReplicaBehind, ReplicaFollows, ReplicaLost
from flowstone.store.forks import forget_in_children
from flowstone.store.local import LocalStore
from flowstone.store.local_sockets import agent_directory, open_directory
from flowstone.store.replica_wire import (
    Exactness,
    Farewell,
    Noted,
    ReplicaStatus,
    Setup,
    await_end,
    decode_status,
    encode,
    node,
    orphans,
    socket_name,
    status_of,
)

_FAREWELL_S = 1.0  # for it to hear what it was told before; one that hears no farewell takes training for dead
_End = Callable[[BaseException | None], None]


class ReplicaLink:
    """The replica of one Checkpointer. `end` on the caller's thread, `note` on the journal's; `start` on the caller's,
    and with several ranks on the journal's.
    """

    def __init__(self, shared: Shared, how: Replica) -> None:
        """Starts nothing yet. Raises ArgumentError for a store that is no directory."""
        if not isinstance(shared.store, LocalStore):
            raise ArgumentError(
                f"every_step=Replica(...) with {shared.store.location}: a replica follows a journal in a directory",
                next="give the Checkpointer a path, or write every_step=True",
            )
        self._location, self._emit, self._engine, self._how = shared.store.location, shared.emit, shared.options, how
        self._rank, self._ranks = shared.group.rank, shared.group.size
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._listener: socket.socket | None = None  # of rank 0, for all replicas, until it is started
        self._port = 0  # where the replicas of several ranks meet
        self._is_started = self._is_over = False
        self._told: Exactness | None = None
        self._is_behind = False
        forget_in_children(self)

    @property
    def node(self) -> str:
        """Where this rank's is, to be told to rank 0."""
        return node()

    def invite(self, nodes: Sequence[str]) -> tuple[int, str]:
        """On rank 0: the port where replicas on these nodes, one for each rank, will meet; or 0, and why they cannot.

        nodes  "": that rank is to have none
        """
        if "" in nodes:
            return 0, f"rank {nodes.index('')} has none: give every_step=Replica(...) on all ranks"
        if len({*nodes}) > 1:
            return 0, "the ranks are on several nodes, and replicas have to be on one"
        if self._listener is None and not self._is_started:
            try:
                self._listener = socket.create_server(("127.0.0.1", 0), backlog=len(nodes))
            except OSError as error:
                return 0, f"rank 0 cannot listen for them: {error}"
            self._port = self._listener.getsockname()[1]
        return self._port, ""

    def meet_at(self, port: int, why_not: str) -> None:
        """What rank 0 has said. The replica is started with the next durable step."""
        if why_not and not self._is_started:
            self._is_started = True
            self._lose(why_not)
        self._port = port

    def start(self) -> None:
        """Start it, once. What goes wrong is told, and training goes on."""
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
            self._lose(f"it could not be started: {error}")
        finally:
            if listener is not None:
                listener.close()

    def _environment(self) -> dict[str, str]:
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": "",
            "OMP_WAIT_POLICY": "passive",  # else its threads spin on the processors on which training runs
        }
        if self._ranks > 1:
            environment = {
                "LOCAL_RANK": str(self._rank), "LOCAL_WORLD_SIZE": str(self._ranks), **environment,
                "RANK": str(self._rank), "WORLD_SIZE": str(self._ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port),
                "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # a log is what went wrong
            }
            environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # which is training's
        return environment

    def noting(self, step: int, journal: str | None, end: _End) -> _End:
        """`end`, which then tells the replica of a durable step."""

        def ended(failure: BaseException | None) -> None:
            end(failure)
            if failure is None:
                self.note(step, journal or "")

        return ended

    def note(self, step: int, journal: str) -> None:
        """Tell it of a durable step, and hear what it has told. Waits for nothing."""
        if self._port:
            self.start()
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
        if self._is_over:
            return
        self._is_over = True
        if link is not None:
            link.close()
        log.warning("there is no replica of %s any more: %s", self._location, reason)
        self._emit(ReplicaLost(reason))

    def forget(self) -> None:
        """In a forked child: the sockets are the parent's."""
        owned, self._link, self._listener, self._process = (self._link, self._listener), None, None, None
        self._is_started = self._is_over = True
        for one in filter(None, owned):
            one.close()

    def end(self) -> None:
        """Training ends in order: so does the replica. Nothing of it is left then, of several ranks once the last one
        has ended: it may have to save what the training of others has left, and goes on without this rank.
        """
        link, process = self._link, self._process
        if self._listener is not None:
            self._listener.close()
        if link is not None:
            self._newest_status()
        self._is_over, may_stay = True, False
        if self._link is not None:
            self._link.settimeout(_FAREWELL_S)
            with suppress(OSError):  # it has ended, or is stopped: it is awaited below
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
        """Wait until the replica has ended, or says that other ranks have died, or for so long. Whether it goes on."""
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
    """What a replica that was killed has left, but a log that says something; one that ended has removed its own."""
    if status_of(location, rank) is not None:
        return
    directory = open_directory(agent_directory(), create=False)
    if directory is None:
        return
    name = socket_name(location, rank)
    log_name = f"{name.removesuffix('.sock')}.log"
    with suppress(OSError):  # safe: it is gone, or the next replica removes it
        os.unlink(name, dir_fd=directory)
    with suppress(OSError):  # safe: a log, which the next replica begins anew
        if not os.stat(log_name, dir_fd=directory, follow_symlinks=False).st_size:
            os.unlink(log_name, dir_fd=directory)
    with suppress(OSError):  # safe: others use it
        os.rmdir(agent_directory())
    os.close(directory)


def link_of(shared: Shared, how: object, ranks: JournalRanks | None) -> ReplicaLink | None:
    """To a replica, if `how` is one. What that of a training that was killed makes durable is durable on return.

    ranks  that write one journal: they agree where their replicas meet
    """
    link = ReplicaLink(shared, how) if isinstance(how, Replica) else None
    if ranks is not None:
        ranks.replica = link
    _await_replicas_of_the_dead(shared)
    return link


def _await_replicas_of_the_dead(shared: Shared) -> None:
    """Each rank does: those of a node's ranks save together, and no rank is to look at the store before."""
    if not isinstance(shared.store, LocalStore):
        return
    location, deadline = shared.store.location, time.monotonic() + REPLICA_PERSIST_S
    for status in orphans(location):
        log.info("waiting for the replica (process %d), which saves step %d", status.pid, status.step)
        if not await_end(location, max(deadline - time.monotonic(), 0.0), status.rank):
            log.warning("the replica (process %d) has not ended after %.0f s", status.pid, REPLICA_PERSIST_S)
