"""The messages between a node's memory agent and its clients: one for each request, one for each answer.

store/memory/local_sockets.py carries them. The first request and its answer exchange versions:
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


class AgentRequest(msgspec.Struct, frozen=True):
    """A client's request. The verb decides which fields are used.

    hello     the first request. number: PROTOCOL; text: version of the program; path: name of the run
    put       create a file whose content is in the descriptor that is sent along
    spare     create a file for a later write, unless this client has enough of them; number: files per draft (a
              checkpoint that is not committed yet). The answer has the file's descriptor
    resize    number: the number of a file that this client has created
    lock      take the run's lock. text: the holder
    keep      set how the run is kept. number: generations (how many checkpoints); target: the directory for flushes;
              seconds: how long the memory is kept after the last process has ended
    settle    flush the newest checkpoint now; the answer says whether a flush is running
    agree     note the checkpoint that is complete on all nodes, which must be kept. path: this checkpoint; number: how
              many jobs have saved. With path "" and number 0 nothing changes. The answer has the path and number that
              were noted last
    serve     serve the run to other nodes, by a child. target: the address, number: the port, text: the secret, in hex.
              The answer's text is the port where the child listens, "" until it does
    """

    verb: Verb
    path: str = ""
    target: str = ""
    text: str = ""
    number: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


class RunStatus(msgspec.Struct, frozen=True):
    """The state of one run in the agent.

    held_bytes    memory of the run, in bytes
    pooled_bytes  the part of held_bytes that belongs to no file now, and is kept for the next one
    jobs          number of connected processes
    flush_to      the directory for flushes; "": none
    flushed_step  the step that the last flush made durable there, or found durable; -1: none
    flush_error   why the last flush failed; "" once one has succeeded
    flushed_id    the id of the checkpoint of flushed_step
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


class FlushResult(msgspec.Struct, frozen=True):
    """The durable checkpoint after a flush, as the child process that flushes reports it to the agent.

    skipped_reason  why a newer checkpoint in memory is not durable; "" if this is the newest one
    """

    step: int
    id: str
    skipped_reason: str = ""


class AgentResponse(msgspec.Struct, frozen=True):
    """The answer to a request. Answers to "open", "create" and "spare" have a descriptor.

    errno     errno of a failure; 0: the request has succeeded
    error     the message of the failure
    full      whether the request failed for lack of memory: `needed_bytes` were needed, and `size_bytes` are available
    kept      numbers of the files that this client has created and that still exist
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
_REQUESTS = msgspec.msgpack.Decoder(AgentRequest)
_ANSWERS = msgspec.msgpack.Decoder(AgentResponse)


def encode(message: AgentRequest | AgentResponse) -> bytes:
    return _ENCODER.encode(message)


def decode_request(data: bytes) -> AgentRequest:
    """Decode a request. Raises msgspec.DecodeError for invalid bytes."""
    return _REQUESTS.decode(data)


def decode_answer(data: bytes) -> AgentResponse:
    return _ANSWERS.decode(data)


def run_name(name: str) -> str:
    """Returns `name`, if it is a valid name of a run in memory. Raises ArgumentError otherwise."""
    is_text = isinstance(name, str) and len(name) <= _RUN_CHARS_MAX
    if not is_text or not _RUN.fullmatch(name) or any(set(part) == {"."} for part in name.split("/")):
        raise ArgumentError(
            f"memory://{name!s:.60} is not a valid name of a run in memory",
            expected=f"letters, digits, '.', '_', '-', and '/' between parts; at most {_RUN_CHARS_MAX} characters",
            next="write memory://run, with the name of your run",
        )
    return name
