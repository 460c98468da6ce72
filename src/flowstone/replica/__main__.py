"""`python -m flowstone.replica DESCRIPTOR`: follows a training, whose end of a pair of sockets is the descriptor.

    build --> the state --pipeline.following--> each step --training dies--> the rest, its newest step saved whole

Of a training of several ranks each has such a process. They are a job of their own: ranks.joined, replica.rounds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import MutableMapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec

from flowstone.config import (
    AGENT_MESSAGE_BYTES_MAX,
    REPLICA_LOOK_S,
    REPLICA_MEET_S,
    REPLICA_NICE,
    EngineOptions,
)
from flowstone.errors import FlowstoneError, NoCheckpointError, StorageError
from flowstone.replica.link import TrainerLink
from flowstone.store.local_sockets import agent_directory, bind, open_directory
from flowstone.store.replica_wire import ReplicaStatus, Setup, decode_order, socket_name, status_of

if TYPE_CHECKING:
    from flowstone.pipeline.following import Following
    from flowstone.ranks.joined import JoinedJob


def main() -> int:
    """The exit status."""
    trainer = socket.socket(fileno=int(sys.argv[1]))
    setup = decode_order(trainer.recv(AGENT_MESSAGE_BYTES_MAX))
    assert isinstance(setup, Setup), "training says that first"
    try:
        directory = open_directory(agent_directory(), create=True)
        assert directory is not None, "it was made"
        log = _detach(directory, setup)
        listener = _bind(directory, setup)
        leave = Leave(directory, setup, log)
        status = ReplicaStatus(os.getpid(), setup.trainer, setup.location, setup.rank)
        link = TrainerLink(trainer, listener, status, leave, ranks=setup.ranks)
    except (FlowstoneError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: leave())
    link.start()
    try:
        _follow(setup, link, leave)
    except BaseException as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error!s:.1000}"
        link.tell(does="failed", reason=reason)
        leave(1, reason)
    return leave()


def _detach(directory: int, setup: Setup) -> str:
    """Training goes first. What is said goes into a file, whose name is returned."""
    os.nice(REPLICA_NICE)
    name = f"{socket_name(setup.location, setup.rank).removesuffix('.sock')}.log"
    log = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return name


def _bind(directory: int, setup: Setup) -> socket.socket:
    """Raises OSError if another replica for that store, and that rank, listens."""
    status = status_of(setup.location, setup.rank)
    if status is not None:
        raise OSError(f"process {status.pid} is a replica for {setup.location}")
    listener = bind(directory, socket_name(setup.location, setup.rank))
    listener.listen()
    return listener


class Leave:
    """Ends the process when it is called, on any thread. Only a log that says something is left.

    joined  the job of several replicas, once there is one
    """

    def __init__(self, directory: int, setup: Setup, log: str) -> None:
        self._directory, self._setup, self._log = directory, setup, log
        self.joined: JoinedJob | None = None

    def __call__(self, status: int = 0, reason: str = "its rank of the training has ended") -> NoReturn:
        """`reason`: why other replicas cannot go on without this one; not heard if this one has left their job."""
        if self.joined is not None:
            self.joined.leave(reason)
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            os.unlink(socket_name(self._setup.location, self._setup.rank), dir_fd=self._directory)
        with contextlib.suppress(OSError):
            if not os.stat(self._log, dir_fd=self._directory, follow_symlinks=False).st_size:
                os.unlink(self._log, dir_fd=self._directory)
        with contextlib.suppress(OSError):  # safe: others use it
            os.rmdir(agent_directory())
        os._exit(status)


def _follow(setup: Setup, link: TrainerLink, leave: Leave) -> None:
    """Until training has died, and its newest step is saved."""
    from flowstone.pipeline.following import Following  # imported here: torch, while training is already heard
    from flowstone.replica.saving import ReplicaCheckpointer

    if setup.ranks > 1:
        leave.joined = _join(setup, link, leave)
    state = _build(setup.build)
    checkpointer = ReplicaCheckpointer(setup.location, engine=msgspec.convert(setup.engine, EngineOptions))
    following = Following(
        checkpointer.store, state, partial(checkpointer.load_checkpoint, state), checkpointer.engine, rank=setup.rank,
        ranks=setup.ranks,
    )
    if setup.ranks == 1:
        is_saved = _follow_alone(following, link, tolerance=setup.tolerance)
    else:
        from flowstone.replica.rounds import Rounds  # imported here: a single rank does not need it

        is_saved = Rounds(following, link, checkpointer, tolerance=setup.tolerance).follow()
    if is_saved:
        link.tell(does="persists", is_orphaned=True)
        following.restore_rest()
        checkpointer.save_journaled(following.step, state)
    checkpointer.close()
    if leave.joined is not None:
        leave.joined.leave()
        os.ftruncate(sys.stderr.fileno(), 0)  # lines on ranks that were waited for, in what has gone well


def _join(setup: Setup, link: TrainerLink, leave: Leave) -> JoinedJob:
    """Become a rank of the replicas' job. If another one ends, this one does."""
    from flowstone.ranks.joined import JoinedJob

    def lose(why: str) -> None:
        if link.training == "ended" or (link.training == "died" and not link.is_following):
            leave()  # there is nothing to be saved
        if link.training == "died":  # else it is told, and tells of it
            print(f"nothing was saved: the replicas of all ranks are needed, and {why}", file=sys.stderr)
        link.tell(does="failed", reason=why)
        leave(1, why)

    joined = JoinedJob(setup.rank, setup.ranks, lose)
    leave.joined = joined
    joined.join(setup.port, setup.listener, REPLICA_MEET_S)
    return joined


def _follow_alone(following: Following, link: TrainerLink, *, tolerance: bool) -> bool:
    """Until training has died. Returns whether the state is to be saved."""
    while True:
        is_orphaned, newest = link.is_orphaned, link.status.newest
        try:
            made = following.advance(link.journal)
        except (StorageError, NoCheckpointError):  # removed meanwhile, for a newer checkpoint
            made = 0
        if made or link.status.step != following.step:
            link.tell(does="follows", step=following.step, exactness=following.exactness,
                      differs_from=following.differs_from)
        elif is_orphaned:
            return following.is_beyond_checkpoint and (following.exactness == "exact" or tolerance)
        else:
            link.await_news(max(newest, following.step), REPLICA_LOOK_S)


def _build(name: str) -> MutableMapping[str, object]:
    module, _, function = name.partition(":")
    state = getattr(import_module(module), function)()
    if not isinstance(state, MutableMapping):
        raise TypeError(f"{name} returns {type(state).__name__}, no dictionary as training gives to `save`")
    return cast("MutableMapping[str, object]", state)


if __name__ == "__main__":
    sys.exit(main())
