"""Decides whether ranks of a node share reads, and which ranks do."""

from __future__ import annotations

from contextlib import ExitStack, closing

import msgspec

from flowstone.config import SHARED_READ_BYTES_MIN
from flowstone.log import log
from flowstone.node_reads.node_reads import LocalPeer, NodeReads, ReadRequest
from flowstone.node_reads.shared_ring import RingAnnouncement, node_identity
from flowstone.plan.read import ReadPlan
from flowstone.ranks import RankGroup
from flowstone.reading.checkpoint import Checkpoint
from flowstone.store.base import Store


def share_reads(
    checkpoint: Checkpoint, plan: ReadPlan, store: Store, group: RankGroup, stack: ExitStack, *, willing: bool
) -> NodeReads | None:
    """Agree with the other ranks of this node that each chunk that several of them need is read once. Returns None if
    no reads are shared.

    stack    closes the ring buffers at the end of the load
    willing  whether this rank takes part
    """
    step, index, this_node = checkpoint.step, checkpoint.index, node_identity()
    request: ReadRequest | None = None
    node_reads: NodeReads | None = None
    failure: Exception | None = None
    as_it_lies = index.chunks.stored is None  # True if no chunk is encoded: ring buffers hold stored bytes
    if willing and group.size > 1 and as_it_lies and plan.bytes >= SHARED_READ_BYTES_MIN:
        path = checkpoint.segment_paths[int(index.chunks.segment[plan.piece[0]])]
        try:
            if store.reads_past_cache(path, plan.bytes):  # the page cache itself shares other reads
                request = stack.enter_context(closing(ReadRequest(index, plan)))
        except OSError as error:
            log.warning("cannot share memory with the ranks on this node (%s); each rank reads for itself", error)
        except Exception as error:
            failure = error
    words = b"" if request is None else msgspec.msgpack.encode(request.ring.announcement)
    announced = group.gather_on_node(f"the shared rings of step {step}", this_node, failure or words)
    peers = [LocalPeer(rank, msgspec.msgpack.decode(words, type=RingAnnouncement)) for rank, words in announced]
    if request is not None and len(peers) > 1:
        me = [peer.rank for peer in peers].index(group.rank)
        try:
            node_reads = NodeReads(request, peers, me, index, plan, deadline_s=group.deadline_s)
            stack.callback(node_reads.close)
        except OSError as error:
            log.warning("ranks on this node cannot see each other's memory (%s); each rank reads for itself", error)
        except Exception as error:
            failure = error
    ready = group.gather_on_node(
        f"the shared reads of step {step}", this_node, failure or (b"" if node_reads is None else b"ready")
    )
    return node_reads if len(ready) == len(peers) else None
