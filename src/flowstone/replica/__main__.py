"""`python -m flowstone.replica DESCRIPTOR`: follows a training, whose end of a pair of sockets is the descriptor.

    build --> the state --pipeline.following--> each step --training dies--> the rest, its newest step saved whole
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import MutableMapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec

from flowstone.config import (
    AGENT_MESSAGE_BYTES_MAX,
    REPLICA_END_S,
    REPLICA_LOOK_S,
    REPLICA_NICE,
    EngineOptions,
)
from flowstone.errors import FlowstoneError, LockedError, NoCheckpointError, StorageError
from flowstone.replica.link import TrainerLink
from flowstone.store.agent_wire import agent_directory, open_directory
from flowstone.store.replica_wire import ReplicaStatus, Setup, decode_order, socket_name, status_of

if TYPE_CHECKING:
    from flowstone.pipeline.following import Following
    from flowstone.replica.saving import ReplicaCheckpointer


def main() -> int:
    """The exit status."""
    trainer = socket.socket(fileno=int(sys.argv[1]))
    setup = decode_order(trainer.recv(AGENT_MESSAGE_BYTES_MAX))
    assert isinstance(setup, Setup), "training says that first"
    try:
        directory = open_directory(agent_directory(), create=True)
        assert directory is not None, "it was made"
        log = _detach(directory, setup)
        listener = _bind(directory, setup.location)
        leave = partial(_leave, directory, setup.location, log)
        link = TrainerLink(trainer, listener, ReplicaStatus(os.getpid(), setup.trainer, setup.location), leave)
    except (FlowstoneError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: leave())
    link.start()
    try:
        _follow(setup, link)
    except BaseException as error:
        traceback.print_exc()
        link.tell(does="failed", reason=f"{type(error).__name__}: {error!s:.1000}")
        leave(1)
    return leave()


def _detach(directory: int, setup: Setup) -> str:
    """Training goes first. What is said goes into a file, whose name is returned."""
    os.nice(REPLICA_NICE)
    name = f"{socket_name(setup.location).removesuffix('.sock')}.log"
    log = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return name


def _bind(directory: int, location: str) -> socket.socket:
    """Raises OSError if another replica for that store listens."""
    status = status_of(location)
    if status is not None:
        raise OSError(f"process {status.pid} is a replica for {location}")
    name = socket_name(location)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{name}")
    finally:
        os.umask(before)
    listener.listen()
    return listener


def _leave(directory: int, location: str, log: str, status: int = 0) -> NoReturn:
    """End the process; on any thread. Only a log that says something is left."""
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        os.unlink(socket_name(location), dir_fd=directory)
    with contextlib.suppress(OSError):
        if not os.stat(log, dir_fd=directory, follow_symlinks=False).st_size:
            os.unlink(log, dir_fd=directory)
    with contextlib.suppress(OSError):  # safe: others use it
        os.rmdir(agent_directory())
    os._exit(status)


def _follow(setup: Setup, link: TrainerLink) -> None:
    """Until training has died, and its newest step is saved."""
    from flowstone.pipeline.following import Following  # imported here: torch, while training is already heard
    from flowstone.replica.saving import ReplicaCheckpointer

    state = _build(setup.build)
    checkpointer = ReplicaCheckpointer(setup.location, engine=msgspec.convert(setup.engine, EngineOptions))
    following = Following(checkpointer.store, state, partial(checkpointer.load_checkpoint, state), checkpointer.engine)
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
            break
        else:
            link.await_news(max(newest, following.step), REPLICA_LOOK_S)
    if following.is_beyond_checkpoint and (following.exactness == "exact" or setup.tolerance):
        link.tell(does="persists")
        _persist(following, checkpointer, state)
    checkpointer.close()


def _build(name: str) -> MutableMapping[str, object]:
    module, _, function = name.partition(":")
    state = getattr(import_module(module), function)()
    if not isinstance(state, MutableMapping):
        raise TypeError(f"{name} returns {type(state).__name__}, no dictionary as training gives to `save`")
    return cast("MutableMapping[str, object]", state)


def _persist(
    following: Following, checkpointer: ReplicaCheckpointer, state: MutableMapping[str, object]
) -> None:
    """Save the step whole. Another job that writes there now has it in the journal, and needs no help."""
    following.restore_rest()
    deadline = time.monotonic() + REPLICA_END_S
    while True:
        try:
            checkpointer.save_journaled(following.step, state)
            return
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(REPLICA_LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
