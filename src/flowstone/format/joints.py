"""Joints: where the objects of several ranks may differ, and how they become one.

Ranks of a pipeline hold other modules, other parameters in their optimizers' groups, other keys in the containers
around them. That is no conflict: all of it is kept. Any other difference is one.

A container whose items are restored one by one is a `Joint`: what any rank has in it is kept, and what two have has
to be the same, or to be a joint itself. `Groups` are an optimizer's: of equal options, their members come together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import msgspec

from flowstone.errors import UnsupportedStateError

Spine: TypeAlias = "dict[str, Spine] | list[Spine] | str | None"
"""Where the joints of a value are: by key for a Joint, by position for a list, GROUPS; None where it has none."""

GROUPS = "groups"
_Found: TypeAlias = "tuple[int, object, Spine]"
"""A rank, its node, and the spine of that."""


class Joint(dict[object, object]):
    """A dict whose items are restored one by one, so that each rank may have others."""


class Groups(list[object]):
    """The groups of an optimizer: `{"params": [path, ...], "options": {...}}` each."""


def spine_of(value: object) -> Spine:
    """Where the joints of an object are, as `encode` would write it."""
    if type(value) is Joint:
        if not all(type(key) is str and key[:1] != "$" for key in value):
            return None  # such keys are no JSON object's
        found = {cast("str", key): spine_of(item) for key, item in value.items()}
        return {key: spine for key, spine in found.items() if spine is not None}
    if type(value) is Groups:
        return GROUPS
    if type(value) is list:
        spines = [spine_of(item) for item in value]
        return spines if any(spine is not None for spine in spines) else None
    return None


def join(section: str, texts: Mapping[int, bytes], spines: Mapping[int, Spine]) -> bytes:
    """One text of what ranks have of a section.

    texts   rank -> the JSON of its node; of equal ones that of the lowest rank is enough
    spines  parallel
    raises  UnsupportedStateError naming the path and the ranks of a difference that is none of joints
    """
    found = [(rank, msgspec.json.decode(text), spines[rank]) for rank, text in sorted(texts.items())]
    return msgspec.json.encode(_joined(section, found))


def _joined(path: str, found: Sequence[_Found]) -> object:
    rank, first, _ = found[0]
    other = next((one for one in found[1:] if not _same(one[1], first)), None)
    if other is None:
        return first
    nodes, spines = [node for _, node, _ in found], [spine for *_, spine in found]
    if all(isinstance(node, dict) and isinstance(spine, dict) for node, spine in zip(nodes, spines, strict=True)):
        return _joined_items(path, found)
    if all(isinstance(spine, list) and isinstance(node, list) for node, spine in zip(nodes, spines, strict=True)):
        lists = cast("list[list[object]]", nodes)
        if {len(items) for items in lists} == {len(lists[0])}:
            return [
                _joined(f"{path}.{i}", [(r, node[i], spine[i]) for r, node, spine in found])  # type: ignore[index]
                for i in range(len(lists[0]))
            ]
    if all(spine == GROUPS for spine in spines):
        return _joined_groups(path, [(r, cast("list[dict[str, object]]", node)) for r, node, _ in found])
    raise UnsupportedStateError(
        f"{path!r} is not the same on rank {other[0]} as on rank {rank}",
        next=f"make it the same on all ranks, or let each keep its own: fs.PerRank(state[{path.partition('.')[0]!r}])",
    )


def _same(one: object, other: object) -> bool:
    """Whether two nodes are, whatever the order of keys. To Python, true is 1, and 1 is 1.0."""
    return msgspec.json.encode(one, order="sorted") == msgspec.json.encode(other, order="sorted")


def _joined_items(path: str, found: Sequence[_Found]) -> dict[str, object]:
    items: dict[str, list[_Found]] = {}
    for rank, node, spine in found:
        inner = cast("dict[str, Spine]", spine)
        for key, item in cast("dict[str, object]", node).items():
            items.setdefault(key, []).append((rank, item, inner.get(key)))
    return {key: _joined(f"{path}.{key}", those) for key, those in items.items()}


def _joined_groups(path: str, found: Sequence[tuple[int, list[dict[str, object]]]]) -> list[dict[str, object]]:
    """Groups of equal options become one: those at the same position, else the only ones of such options."""
    joined: list[tuple[object, dict[str, None]]] = []  # options and members, in order
    home: dict[str, int] = {}  # member -> its group among the joined
    for rank, groups in found:
        taken: set[int] = set()  # two groups of one rank stay two
        for i, group in enumerate(groups):
            options = group["options"]
            alike = [at for at, (known, _) in enumerate(joined) if at not in taken and _same(known, options)]
            at = i if i in alike else alike[0] if len(alike) == 1 else len(joined)
            if at == len(joined):
                joined.append((options, {}))
            taken.add(at)
            for member in cast("list[str]", group["params"]):
                if home.setdefault(member, at) != at:
                    raise UnsupportedStateError(
                        f"{member!r} is in a group of other options on rank {rank} than on a rank before it",
                        path=path, next="give a parameter's group the same options on every rank that holds it",
                    )
                joined[at][1][member] = None
    return [{"params": list(members), "options": options} for options, members in joined]
