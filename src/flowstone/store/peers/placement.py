"""Decides which nodes keep copies of a node's checkpoints (the group placement of Gemini, SOSP 2023).

Nodes are numbered from 0 on.
"""

from __future__ import annotations


def groups(nodes: int, replicas: int) -> list[tuple[int, ...]]:
    """Divide the nodes into groups of `replicas` nodes, which keep each other's checkpoints. The last group includes
    the remainder.

    So the last group may have up to 2 x replicas - 1 nodes. In it, only the next nodes in a ring keep a node's
    checkpoints: see `keepers`.
    """
    assert nodes > 0, "a job has at least one node"
    assert replicas > 0, "the node's own copy is one of them"
    count = max(1, nodes // replicas)
    return [
        tuple(range(index * replicas, nodes if index == count - 1 else (index + 1) * replicas))
        for index in range(count)
    ]


def keepers(node: int, nodes: int, replicas: int) -> tuple[int, ...]:
    """The nodes that keep the checkpoint of `node`: `node` itself, then the next nodes of its group (after the last
    one, the first).

    If there are fewer nodes than `replicas`, all nodes keep it.
    """
    group = next(candidate for candidate in groups(nodes, replicas) if node in candidate)
    index = group.index(node)
    return tuple(group[(index + step) % len(group)] for step in range(min(replicas, len(group))))
