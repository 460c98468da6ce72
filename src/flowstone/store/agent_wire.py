"""What the memory agent of a node and its clients say to each other: one message for each request, one for each answer.

store/local_sockets.py carries them. The first request and its answer tell the versions:
docs/decisions/025-memory-tier.md.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from flowstone.errors import ArgumentError

PROTOCOL = 3
SOCKET_NAME, LOCK_NAME, LOG_NAME = "agent.sock", "agent.lock", "agent.log"
_RUN = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
_RUN_CHARS_MAX = 200

Verb = Literal[
    "hello", "exists", "names", "look", "open", "release", "create", "spare", "put", "resize", "make_directory",
    "remove", "rename", "link", "lock", "lost_lock", "unlock", "free", "keep", "settle", "runs", "agree", "serve",
]


class Request(msgspec.Struct, frozen=True):
    """What a client asks for. Which of the fields count follows from the verb.

    hello     number: PROTOCOL; text: version of the program; path: name of the run
    put       with a descriptor: a file that has its bytes
    spare     a file for later, with a descriptor, unless this client has enough of them; number: how many a draft has
    resize    number: of a file that this client has created
    lock      text: the holder
    keep      how the run is kept: number: generations; target: the directory to flush to; seconds: its memory stays so
    settle    flush what is newest, now; the answer says whether a flush is under way
    agree     path: the checkpoint that is whole on all nodes, which stays; number: of the jobs that have saved. Of ""
              and 0 nothing changes; the answer has both
    serve     the run to other nodes, by a child; target: the address, number: the port, text: the secret, in hex.
              The answer's text is the port where it listens, "" before it does
    """

    verb: Verb
    path: str = ""
    target: str = ""
    text: str = ""
    number: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


class RunStatus(msgspec.Struct, frozen=True):
    """What the agent holds of one run.

    held_bytes    of memory, pooled_bytes of these belong to no file now
    jobs          processes that are connected to it
    flush_to      the directory to flush to; "": none
    flushed_step  the step that the last flush has found durable there, or has made so; -1: none
    flush_error   why the last attempt of a flush failed; "" once one has succeeded
    flushed_id    the id of that checkpoint
    """

    name: str
    steps: tuple[int, ...]
    held_bytes: int
    pooled_bytes: int
    jobs: int
    holder: str
    flush_to: str
    flushed_step: int
    is_flushing: bool
    flush_error: str
    flushed_id: str = ""


class Copied(msgspec.Struct, frozen=True):
    """The durable checkpoint after a flush, as its child process reports it to the agent.

    skipped_reason  why a newer checkpoint in memory is not durable; "" if this is the newest one
    """

    step: int
    id: str
    skipped_reason: str = ""


class Answer(msgspec.Struct, frozen=True):
    """The answer to a request; with a descriptor where it is to "open", "create" or "spare".

    errno     of a refusal; `error` says it in words
    full      not enough memory: `needed_bytes` are needed, `size_bytes` available
    kept      numbers of the files that still exist, of those that this client has created
    """

    errno: int = 0
    error: str = ""
    number: int = 0
    size_bytes: int = 0
    touched_bytes: int = 0
    needed_bytes: int = 0
    full: bool = False
    yes: bool = False
    text: str = ""
    names: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()
    runs: tuple[RunStatus, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(Request)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    return _ENCODER.encode(message)


def decode_request(data: bytes) -> Request:
    """Raises msgspec.DecodeError for anything else."""
    return _REQUESTS.decode(data)


def decode_answer(data: bytes) -> Answer:
    return _ANSWERS.decode(data)


def run_name(name: str) -> str:
    """The name of a run in memory. Raises ArgumentError for one that cannot be."""
    is_text = isinstance(name, str) and len(name) <= _RUN_CHARS_MAX
    if not is_text or not _RUN.fullmatch(name) or any(set(part) == {"."} for part in name.split("/")):
        raise ArgumentError(
            f"memory://{name!s:.60} names no run in memory",
            expected=f"letters, digits, '.', '_', '-', parts apart by '/'; at most {_RUN_CHARS_MAX}",
            next="write memory://run, with a name of your own",
        )
    return name
