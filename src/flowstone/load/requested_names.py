"""Gathers the names of the tensors that each rank needs from a checkpoint, in one agreement of all ranks."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import compress

import msgspec
import numpy as np

from flowstone.errors import RankError
from flowstone.format.digest import digest
from flowstone.format.manifest import encode_manifest
from flowstone.ranks import RankGroup
from flowstone.ranks.exchange import Decision
from flowstone.reading.compare import LoadRequest


class RequestedNames(msgspec.Struct, frozen=True):
    """The requests of all ranks together.

    elsewhere  names of the stored tensors that any rank needs, this rank included; empty in a group of one rank
    unwanted   names of the stored objects that no rank needs, although some rank requests their section
    """

    elsewhere: Container[str]
    unwanted: Container[str]


class _Request(msgspec.Struct, frozen=True):
    """The message that one rank sends to rank 0. Rank 0's answer, for all ranks together, has the same form.

    identity  id of the checkpoint that this rank has read
    tensors   one bit for each stored name, in order: whether this rank needs it
    objects   requested section -> names of stored objects in it that this rank does not need
    """

    identity: str
    tensors: bytes
    objects: dict[str, list[str]]


def gather_requests(group: RankGroup, phase: str, own_request: LoadRequest) -> RequestedNames:
    """Gather the requests of all ranks, once each rank has compared its own state with the checkpoint.

    raises  RankError if ranks see different checkpoints, or another rank has failed
    """
    if group.size == 1:
        return RequestedNames((), {name for names in own_request.unneeded_objects().values() for name in names})
    tensors = np.packbits(own_request.needed_names()).tobytes()
    identity = f"a manifest of digest {digest(encode_manifest(own_request.checkpoint.manifest))}"
    request = msgspec.msgpack.encode(_Request(identity, tensors, own_request.unneeded_objects()))
    answer = msgspec.msgpack.decode(
        group.decide_from_all(phase, request, lambda messages: _merge(messages, phase)), type=_Request
    )
    used = np.unpackbits(np.frombuffer(answer.tensors, np.uint8), count=len(own_request.names))
    return RequestedNames(
        set(compress(own_request.names, used.tolist())), {name for names in answer.objects.values() for name in names}
    )


def _merge(messages: Sequence[bytes], phase: str) -> Decision:
    """On rank 0: merge the requests of all ranks. The result has the tensors that any rank needs, and the objects that
    none of the ranks that request their section needs.
    """
    requests = [msgspec.msgpack.decode(message, type=_Request) for message in messages]
    left: dict[str, set[str]] = {}
    for rank, request in enumerate(requests):
        if request.identity != requests[0].identity:
            raise RankError(
                f"rank {rank} has read another checkpoint than rank 0: {request.identity} instead of "
                f"{requests[0].identity}", rank=rank, phase=phase,
                next="use one directory that every node sees, with changes visible at once",
            )
        for section, names in request.objects.items():
            left[section] = left[section].intersection(names) if section in left else set(names)
    tensors = np.bitwise_or.reduce([np.frombuffer(request.tensors, np.uint8) for request in requests]).tobytes()
    objects = {section: sorted(names) for section, names in left.items()}
    return Decision(msgspec.msgpack.encode(_Request(requests[0].identity, tensors, objects)))
