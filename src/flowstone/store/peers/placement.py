"""Which nodes keep copies of which others' checkpoints (Gemini, SOSP 2023, group placement and its remainder's ring).

Pure. Nodes are numbers, 0 and up.
"""

from __future__ import annotations


def groups(nodes: int, replicas: int) -> list[tuple[int, ...]]:
    """Groups of `replicas` nodes whose members keep each other's checkpoints; the last one has the remainder as well.

    The last group, of up to 2 x replicas - 1 nodes, is a ring: see `keepers`.
    """
    assert nodes > 0, "a job has a node"
    assert replicas > 0, "the owner's own is one of them"
    count = max(1, nodes // replicas)
    return [
        tuple(range(at * replicas, nodes if at == count - 1 else (at + 1) * replicas)) for at in range(count)
    ]


def keepers(node: int, nodes: int, replicas: int) -> tuple[int, ...]:
    """The nodes that keep the checkpoint of `node`: itself, then those that follow in its group, around the end of it.

    With fewer nodes than replicas, all of them.
    """
    group = next(one for one in groups(nodes, replicas) if node in one)
    at = group.index(node)
    return tuple(group[(at + step) % len(group)] for step in range(min(replicas, len(group))))
