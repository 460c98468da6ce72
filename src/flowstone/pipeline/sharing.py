"""Whether the ranks of a node read for each other, and which of them."""

from __future__ import annotations

from contextlib import ExitStack, closing

import msgspec

from flowstone.checkpoint import Checkpoint
from flowstone.config import SHARED_READ_BYTES_MIN
from flowstone.log import log
from flowstone.plan.read import ReadPlan
from flowstone.ranks import RankGroup
from flowstone.stage.node_reads import LocalPeer, NodeReads, ReadRequest
from flowstone.store.base import Store
from flowstone.store.shared_ring import Announcement, node


def share_reads(
    checkpoint: Checkpoint, plan: ReadPlan, store: Store, group: RankGroup, stack: ExitStack, *, willing: bool
) -> NodeReads | None:
    """How the ranks of this node share reads of the chunks that several of them need; None: each reads for itself.

    stack    closes the resources
    willing  whether this rank takes part
    """
    step, index, this_node = checkpoint.step, checkpoint.index, node()
    request: ReadRequest | None = None
    node_reads: NodeReads | None = None
    failure: Exception | None = None
    as_it_lies = index.chunks.stored is None  # a ring buffer holds extents in their stored form
    if willing and group.size > 1 and as_it_lies and plan.bytes >= SHARED_READ_BYTES_MIN:
        path = checkpoint.segment_paths[int(index.chunks.segment[plan.piece[0]])]
        try:
            if store.reads_past_cache(path, plan.bytes):  # else the page cache shares reads already
                request = stack.enter_context(closing(ReadRequest(index, plan)))
        except OSError as error:
            log.warning("cannot share memory with the ranks on this node (%s); each rank reads for itself", error)
        except Exception as error:
            failure = error
    words = b"" if request is None else msgspec.msgpack.encode(request.ring.announcement)
    said = group.near(f"the shared rings of step {step}", this_node, failure or words)
    peers = [LocalPeer(rank, msgspec.msgpack.decode(words, type=Announcement)) for rank, words in said]
    if request is not None and len(peers) > 1:
        me = [one.rank for one in peers].index(group.rank)
        try:
            node_reads = NodeReads(request, peers, me, index, plan, deadline_s=group.deadline_s)
            stack.callback(node_reads.close)
        except OSError as error:
            log.warning("ranks on this node cannot see each other's memory (%s); each rank reads for itself", error)
        except Exception as error:
            failure = error
    ready = group.near(
        f"sharing what step {step} holds", this_node, failure or (b"" if node_reads is None else b"ready")
    )
    return node_reads if len(ready) == len(peers) else None
