"""Merge points: places where the objects of several ranks may differ, and how they are merged.

Ranks of a pipeline hold different modules, different parameters in their optimizers' groups, different keys in the
containers around them. These differences are no conflict: the merged value has all of them. Any other difference is an
error.

A container whose items are restored one by one is a `MergePoint`: the merged one has the items of all ranks; an item
that two ranks have must be equal on both, or be a merge point itself. `Groups` are an optimizer's parameter groups:
groups with equal options are merged, with the members of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import msgspec

from flowstone.errors import UnsupportedStateError

MergeMap: TypeAlias = "dict[str, MergeMap] | list[MergeMap] | str | None"
"""Where a value contains merge points: by key for a MergePoint, by position for a list, GROUPS; None if it contains
none.
"""

GROUPS = "groups"
_Found: TypeAlias = "tuple[int, object, MergeMap]"
"""A rank, its node, and the node's merge map."""


class MergePoint(dict[object, object]):
    """A dict whose items are restored one by one, so that ranks may have different items."""


class Groups(list[object]):
    """The groups of an optimizer: `{"params": [path, ...], "options": {...}}` each."""


def merge_map_of(value: object) -> MergeMap:
    """The merge map of an object, in the form that `encode` writes."""
    if type(value) is MergePoint:
        if not all(type(key) is str and key[:1] != "$" for key in value):
            return None  # a JSON object cannot have such keys
        found = {cast("str", key): merge_map_of(item) for key, item in value.items()}
        return {key: merge_map for key, merge_map in found.items() if merge_map is not None}
    if type(value) is Groups:
        return GROUPS
    if type(value) is list:
        merge_maps = [merge_map_of(item) for item in value]
        return merge_maps if any(merge_map is not None for merge_map in merge_maps) else None
    return None


def merge(section: str, texts: Mapping[int, bytes], merge_maps: Mapping[int, MergeMap]) -> bytes:
    """Merge the ranks' texts of a section into one.

    texts       rank -> the JSON of its node; of equal texts, the lowest rank's is enough
    merge_maps  parallel
    raises      UnsupportedStateError naming the path and the ranks of a difference outside of merge points
    """
    found = [(rank, msgspec.json.decode(text), merge_maps[rank]) for rank, text in sorted(texts.items())]
    return msgspec.json.encode(_merged(section, found))


def _merged(path: str, found: Sequence[_Found]) -> object:
    rank, first, _ = found[0]
    other = next((one for one in found[1:] if not _same(one[1], first)), None)
    if other is None:
        return first
    nodes, merge_maps = [node for _, node, _ in found], [merge_map for *_, merge_map in found]
    if all(
        isinstance(node, dict) and isinstance(merge_map, dict) for node, merge_map in zip(
            nodes, merge_maps, strict=True
        )
    ):
        return _merged_items(path, found)
    if all(
        isinstance(merge_map, list) and isinstance(node, list) for node, merge_map in zip(
            nodes, merge_maps, strict=True
        )
    ):
        lists = cast("list[list[object]]", nodes)
        if {len(items) for items in lists} == {len(lists[0])}:
            return [
                _merged(f"{path}.{i}", [(r, n[i], m[i]) for r, n, m in found])  # type: ignore[index]
                for i in range(len(lists[0]))
            ]
    if all(merge_map == GROUPS for merge_map in merge_maps):
        return _merged_groups(path, [(r, cast("list[dict[str, object]]", node)) for r, node, _ in found])
    raise UnsupportedStateError(
        f"{path!r} is not the same on rank {other[0]} as on rank {rank}",
        next=f"make it the same on all ranks, or let each keep its own: fs.PerRank(state[{path.partition('.')[0]!r}])",
    )


def _same(one: object, other: object) -> bool:
    """Whether two nodes are equal, in any order of keys. (For Python True == 1 and 1 == 1.0; here they differ.)"""
    return msgspec.json.encode(one, order="sorted") == msgspec.json.encode(other, order="sorted")


def _merged_items(path: str, found: Sequence[_Found]) -> dict[str, object]:
    items: dict[str, list[_Found]] = {}
    for rank, node, merge_map in found:
        inner = cast("dict[str, MergeMap]", merge_map)
        for key, item in cast("dict[str, object]", node).items():
            items.setdefault(key, []).append((rank, item, inner.get(key)))
    return {key: _merged(f"{path}.{key}", those) for key, those in items.items()}


def _merged_groups(path: str, found: Sequence[tuple[int, list[dict[str, object]]]]) -> list[dict[str, object]]:
    """Merge groups with equal options: those at the same position, else those that are the only ones with such options.
    """
    merged: list[tuple[object, dict[str, None]]] = []  # options and members, in order
    home: dict[str, int] = {}  # member -> its group among the merged ones
    for rank, groups in found:
        taken: set[int] = set()  # two groups of one rank are never merged
        for i, group in enumerate(groups):
            options = group["options"]
            alike = [at for at, (known, _) in enumerate(merged) if at not in taken and _same(known, options)]
            at = i if i in alike else alike[0] if len(alike) == 1 else len(merged)
            if at == len(merged):
                merged.append((options, {}))
            taken.add(at)
            for member in cast("list[str]", group["params"]):
                if home.setdefault(member, at) != at:
                    raise UnsupportedStateError(
                        f"{member!r} is in a group with other options on rank {rank} than on a lower rank",
                        path=path, next="give a parameter's group the same options on every rank that holds it",
                    )
                merged[at][1][member] = None
    return [{"params": list(members), "options": options} for options, members in merged]
