"""`python -m flowstone.replica DESCRIPTOR`: keeps a second copy of a trainer's state up to date. DESCRIPTOR is the
number of an open socket, whose other end the trainer has.

    build --> the state --journal.following--> each step --training is killed--> a full checkpoint of the newest step

Each rank of a training job has its own replica. The replicas of all ranks form one job (joined_job.py, rounds.py).
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
    REPLICA_MEET_S,
    REPLICA_NICE,
    REPLICA_POLL_S,
    EngineOptions,
)
from flowstone.errors import FlowstoneError, NoCheckpointError, StorageError
from flowstone.replica.link import TrainerLink
from flowstone.replica.replica_wire import ReplicaStatus, Setup, decode_order, replica_status, socket_name
from flowstone.store.memory.local_sockets import agent_directory, bind, open_directory

if TYPE_CHECKING:
    from flowstone.replica.following import JournalFollower
    from flowstone.replica.joined_job import JoinedJob


def main() -> int:
    """Run the replica. Returns the exit status."""
    trainer = socket.socket(fileno=int(sys.argv[1]))
    setup = decode_order(trainer.recv(AGENT_MESSAGE_BYTES_MAX))
    assert isinstance(setup, Setup), "the first message of a trainer"
    try:
        directory = open_directory(agent_directory(), create=True)
        assert directory is not None, "it was made"
        log = _detach(directory, setup)
        listener = _bind(directory, setup)
        leave = ReplicaExit(directory, setup, log)
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
        link.update_status(does="failed", reason=reason)
        leave(1, reason)
    return leave()


def _detach(directory: int, setup: Setup) -> str:
    """Lower the priority below the trainer's, and send output to a log file. Returns the name of that file."""
    os.nice(REPLICA_NICE)
    name = f"{socket_name(setup.location, setup.rank).removesuffix('.sock')}.log"
    log = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return name


def _bind(directory: int, setup: Setup) -> socket.socket:
    """Listen for status requests. Raises OSError if another replica of that store and rank listens already."""
    status = replica_status(setup.location, setup.rank)
    if status is not None:
        raise OSError(f"process {status.pid} is already a replica of {setup.location}")
    listener = bind(directory, socket_name(setup.location, setup.rank))
    listener.listen()
    return listener


class ReplicaExit:
    """Ends this process when it is called, on any thread. Removes the process' files, except a log with errors.

    job  the job of several replicas, once this one has joined
    """

    def __init__(self, directory: int, setup: Setup, log: str) -> None:
        self._directory, self._setup, self._log = directory, setup, log
        self.job: JoinedJob | None = None

    def announce_to(self, job: JoinedJob) -> None:
        """From now on, ReplicaExit announces the end of this process to the other replicas of `job`."""
        self.job = job

    def __call__(self, status: int = 0, reason: str = "its trainer has ended") -> NoReturn:
        """End this process. Unless it has already left the replicas' job, sends `reason` to the other replicas, which
        cannot continue without this one.
        """
        if self.job is not None:
            self.job.leave(reason)
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            os.unlink(socket_name(self._setup.location, self._setup.rank), dir_fd=self._directory)
        with contextlib.suppress(OSError):
            if not os.stat(self._log, dir_fd=self._directory, follow_symlinks=False).st_size:
                os.unlink(self._log, dir_fd=self._directory)
        with contextlib.suppress(OSError):  # another replica may still use the directory
            os.rmdir(agent_directory())
        os._exit(status)


def _follow(setup: Setup, link: TrainerLink, leave: ReplicaExit) -> None:
    """Follow the trainer until it is killed, then save its newest step."""
    from flowstone.replica.following import JournalFollower  # imported here, with torch, while `link` already runs
    from flowstone.replica.saving import FollowerCheckpointer

    if setup.ranks > 1:
        _join(setup, link, leave)
    state = _build(setup.build)
    checkpointer = FollowerCheckpointer(setup.location, engine=msgspec.convert(setup.engine, EngineOptions))
    following = JournalFollower(
        checkpointer.store, state, partial(checkpointer.load_checkpoint, state), checkpointer.engine, rank=setup.rank,
        ranks=setup.ranks,
    )
    if setup.ranks == 1:
        is_saved = _follow_alone(following, link, tolerance=setup.tolerance)
    else:
        from flowstone.replica.rounds import ReplicaCoordinator  # imported here: a single rank does not need it

        is_saved = ReplicaCoordinator(following, link, checkpointer, tolerance=setup.tolerance).follow()
    if is_saved:
        link.update_status(does="persists", is_orphaned=True)
        following.restore_remaining()
        checkpointer.save_journaled(following.step, state)
    checkpointer.close()
    if leave.job is not None:
        leave.job.leave()
        # all went well, so remove the lines that were logged while this replica waited for others
        os.ftruncate(sys.stderr.fileno(), 0)


def _join(setup: Setup, link: TrainerLink, leave: ReplicaExit) -> None:
    """Become a rank of the replicas' job. If another replica ends, so does this process."""
    from flowstone.replica.joined_job import JoinedJob

    def report_lost(why: str) -> None:
        if link.training == "ended" or (link.training == "died" and not link.is_following):
            leave()  # no state was loaded yet, so there is nothing to save
        if link.training == "died":  # if it lives, the trainer gets the error, and reports it
            print(f"nothing was saved: a save needs the replicas of all ranks, but {why}", file=sys.stderr)
        link.update_status(does="failed", reason=why)
        leave(1, why)

    job = JoinedJob(setup.rank, setup.ranks, report_lost)
    leave.announce_to(job)
    job.join(setup.port, setup.listener, REPLICA_MEET_S)


def _follow_alone(following: JournalFollower, link: TrainerLink, *, tolerance: bool) -> bool:
    """Follow the trainer until it is killed. Returns whether the state must be saved."""
    while True:
        is_orphaned, newest = link.is_orphaned, link.status.newest
        try:
            made = following.advance(link.journal)
        except (StorageError, NoCheckpointError):  # removed meanwhile: there is a newer checkpoint
            made = 0
        if made or link.status.step != following.step:
            link.update_status(does="follows", step=following.step, exactness=following.exactness,
                      differs_from=following.differs_from)
        elif is_orphaned:
            return following.is_beyond_checkpoint and (following.exactness == "exact" or tolerance)
        else:
            link.await_step(max(newest, following.step), REPLICA_POLL_S)


def _build(name: str) -> MutableMapping[str, object]:
    module, _, function = name.partition(":")
    state = getattr(import_module(module), function)()
    if not isinstance(state, MutableMapping):
        raise TypeError(f"{name} returns {type(state).__name__}, expected a dictionary like the one passed to `save`")
    return cast("MutableMapping[str, object]", state)


if __name__ == "__main__":
    sys.exit(main())
