"""Merge points: containers that may differ between ranks, and how the containers of all ranks are merged into one.

Ranks of a pipeline hold different modules, different parameters in their optimizers' groups, and different keys in the
containers around them. The merged value contains all of them. Any other difference is an error.

A container whose items are restored one by one is a `MergePoint`. The merged container has the items of all ranks; an
item that two ranks have must be equal on both, or be a merge point itself. `Groups` are an optimizer's parameter
groups: groups with equal options become one group with the members of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import msgspec

from flowstone.errors import UnsupportedStateError

MergeMap: TypeAlias = "dict[str, MergeMap] | list[MergeMap] | str | None"
"""Where a value contains merge points: a dict by key for a MergePoint, a list by position for a list, GROUPS for
`Groups`; None if it contains none.
"""

GROUPS = "groups"
_RankNode: TypeAlias = "tuple[int, object, MergeMap]"
"""A rank, its node, and the node's merge map."""


class MergePoint(dict[object, object]):
    """A dict whose items are restored one by one, so that ranks may have different items."""


class Groups(list[object]):
    """The parameter groups of an optimizer. Each is a dict `{"params": [path, ...], "options": {...}}`."""


def merge_map_of(value: object) -> MergeMap:
    """Describes which containers inside of `value` are merge points. The result has the form of the object's JSON."""
    if type(value) is MergePoint:
        if not all(type(key) is str and key[:1] != "$" for key in value):
            return None  # a JSON object cannot have keys of this kind
        by_key = {cast("str", key): merge_map_of(item) for key, item in value.items()}
        return {key: merge_map for key, merge_map in by_key.items() if merge_map is not None}
    if type(value) is Groups:
        return GROUPS
    if type(value) is list:
        merge_maps = [merge_map_of(item) for item in value]
        return merge_maps if any(merge_map is not None for merge_map in merge_maps) else None
    return None


def merge(section: str, texts: Mapping[int, bytes], merge_maps: Mapping[int, MergeMap]) -> bytes:
    """Merge the JSON that each rank has for a section into one.

    texts       rank -> its JSON; if ranks have the same text, only the lowest of them need be listed
    merge_maps  rank -> the merge points in its JSON (`merge_map_of`)
    raises      UnsupportedStateError  ranks differ outside of merge points; the error names the path and the ranks
    """
    nodes = [(rank, msgspec.json.decode(text), merge_maps[rank]) for rank, text in sorted(texts.items())]
    return msgspec.json.encode(_merged(section, nodes))


def _merged(path: str, rank_nodes: Sequence[_RankNode]) -> object:
    rank, first, _ = rank_nodes[0]
    other = next((node for node in rank_nodes[1:] if not _same(node[1], first)), None)
    if other is None:
        return first
    nodes, merge_maps = [node for _, node, _ in rank_nodes], [merge_map for *_, merge_map in rank_nodes]
    if all(
        isinstance(node, dict) and isinstance(merge_map, dict) for node, merge_map in zip(
            nodes, merge_maps, strict=True
        )
    ):
        return _merged_items(path, rank_nodes)
    if all(
        isinstance(merge_map, list) and isinstance(node, list) for node, merge_map in zip(
            nodes, merge_maps, strict=True
        )
    ):
        lists = cast("list[list[object]]", nodes)
        if {len(items) for items in lists} == {len(lists[0])}:
            return [
                _merged(f"{path}.{i}", [(r, n[i], m[i]) for r, n, m in rank_nodes])  # type: ignore[index]
                for i in range(len(lists[0]))
            ]
    if all(merge_map == GROUPS for merge_map in merge_maps):
        return _merged_groups(path, [(r, cast("list[dict[str, object]]", node)) for r, node, _ in rank_nodes])
    raise UnsupportedStateError(
        f"{path!r} is not the same on rank {other[0]} as on rank {rank}",
        next="make this value the same on all ranks, or let each rank keep its own: "
        f"fs.PerRank(state[{path.partition('.')[0]!r}])",
    )


def _same(node: object, other: object) -> bool:
    """Whether two nodes are equal; the order of keys does not matter. Unlike in Python, True, 1 and 1.0 are different.
    """
    return msgspec.json.encode(node, order="sorted") == msgspec.json.encode(other, order="sorted")


def _merged_items(path: str, rank_nodes: Sequence[_RankNode]) -> dict[str, object]:
    items: dict[str, list[_RankNode]] = {}
    for rank, node, merge_map in rank_nodes:
        inner = cast("dict[str, MergeMap]", merge_map)
        for key, item in cast("dict[str, object]", node).items():
            items.setdefault(key, []).append((rank, item, inner.get(key)))
    return {key: _merged(f"{path}.{key}", key_nodes) for key, key_nodes in items.items()}


def _merged_groups(path: str, rank_groups: Sequence[tuple[int, list[dict[str, object]]]]) -> list[dict[str, object]]:
    """Merge parameter groups that have equal options. A rank's group is merged with the merged group at the same
    position if that has the same options; otherwise with the only merged group that has them. If there are none or
    several, it becomes a new merged group.
    """
    merged: list[tuple[object, dict[str, None]]] = []  # options and parameters of each merged group, in order
    home: dict[str, int] = {}  # parameter -> number of its merged group
    for rank, groups in rank_groups:
        taken: set[int] = set()  # merged groups that have a group of this rank: two groups of one rank are never merged
        for i, group in enumerate(groups):
            options = group["options"]
            free = [(g, other) for g, (other, _) in enumerate(merged) if g not in taken]
            alike = [g for g, other in free if _same(other, options)]
            target = i if i in alike else alike[0] if len(alike) == 1 else len(merged)
            if target == len(merged):
                merged.append((options, {}))
            taken.add(target)
            for member in cast("list[str]", group["params"]):
                if home.setdefault(member, target) != target:
                    raise UnsupportedStateError(
                        f"{member!r} is in a parameter group whose options on rank {rank} differ from those on a "
                        "lower rank", path=path,
                        next="give a parameter's group the same options on every rank that holds it",
                    )
                merged[target][1][member] = None
    return [{"params": list(members), "options": options} for options, members in merged]
