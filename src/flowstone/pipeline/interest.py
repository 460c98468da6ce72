"""What the ranks of a group need of a checkpoint, learnt in one exchange: each costs the slowest rank's time."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import compress

import msgspec
import numpy as np

from flowstone.errors import RankError
from flowstone.format.digest import digest
from flowstone.format.manifest import encode_manifest
from flowstone.pipeline.compare import Wanted
from flowstone.ranks import RankGroup
from flowstone.ranks.wire import Decision


class Interest(msgspec.Struct, frozen=True):
    """The needs of all ranks together.

    elsewhere  stored tensors that some rank needs; empty in a group of one
    unwanted   names of stored objects that no rank needs of those that request their section
    """

    elsewhere: Container[str]
    unwanted: Container[str]


class _Words(msgspec.Struct, frozen=True):
    """One rank's message; rank 0's answer has the same form.

    identity  of the checkpoint that this rank has read
    tensors   one bit for each stored name, in order: whether this rank needs it
    objects   by section that the state requests: names of stored objects that this rank does not need
    """

    identity: str
    tensors: bytes
    objects: dict[str, list[str]]


def learn_interest(group: RankGroup, phase: str, wanted: Wanted) -> Interest:
    """What all ranks need, once each has compared its own state.

    raises  RankError if ranks see different checkpoints, or another rank has failed
    """
    if group.size == 1:
        return Interest((), {name for names in wanted.unwanted().values() for name in names})
    tensors = np.packbits(wanted.names_used()).tobytes()
    identity = f"a manifest of digest {digest(encode_manifest(wanted.checkpoint.manifest))}"
    words = msgspec.msgpack.encode(_Words(identity, tensors, wanted.unwanted()))
    answer = msgspec.msgpack.decode(group.ask(phase, words, lambda said: _joined(said, phase)), type=_Words)
    used = np.unpackbits(np.frombuffer(answer.tensors, np.uint8), count=len(wanted.names))
    return Interest(
        set(compress(wanted.names, used.tolist())), {name for names in answer.objects.values() for name in names}
    )


def _joined(said: Sequence[bytes], phase: str) -> Decision:
    """On rank 0: what any rank needs, and what no rank needs."""
    words = [msgspec.msgpack.decode(one, type=_Words) for one in said]
    left: dict[str, set[str]] = {}
    for rank, one in enumerate(words):
        if one.identity != words[0].identity:
            raise RankError(
                f"rank {rank} sees {one.identity}, rank 0 sees {words[0].identity}", rank=rank, phase=phase,
                next="use one directory that every node sees, with changes visible at once",
            )
        for section, names in one.objects.items():
            left[section] = left[section].intersection(names) if section in left else set(names)
    tensors = np.bitwise_or.reduce([np.frombuffer(one.tensors, np.uint8) for one in words]).tobytes()
    objects = {section: sorted(names) for section, names in left.items()}
    return Decision(msgspec.msgpack.encode(_Words(words[0].identity, tensors, objects)))
