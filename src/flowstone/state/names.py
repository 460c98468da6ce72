"""Names: the place of a value in the state, as a dotted path that is stored in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flowstone.errors import UnsupportedStateError
from flowstone.format.bounds import short_repr
from flowstone.format.leaves import valid_text
from flowstone.format.objects import key_text, unsupported_error

WRAPPERS = frozenset({
    "_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module", "_original_module",
})
"""Components that wrappers add to names (the last two are from Fabric). Checkpoints omit all of them."""
_WRAPPERS = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(sorted(WRAPPERS))})\.")

PLAIN_KEYS = frozenset({str, int})
"""Types of keys that are stored unchanged, and whose text is a component of a name."""


class Place(NamedTuple):
    """Where a value is in the state: its dotted name, and the keys that lead to it."""

    name: str
    key: object
    parent: Place | None
    depth: int
    rank: int | None  # for a value that each rank has for itself: whose value it is; None for all other values

    def child(self, key: object) -> Place:
        """The place of the value with the key `key` inside of this place."""
        return Place(f"{self.name}.{key_text(key)}", key, self, self.depth + 1, self.rank)

    def called(self, name: str, key: object) -> Place:
        """The place of the value with the key `key` inside of this place, with the full name `name`."""
        return Place(name, key, self, self.depth + 1, self.rank)

    @property
    def path(self) -> str:
        """The keys as Python code, such as "state['a']['b']". Different places with the same name have different paths.
        """
        keys: list[object] = []
        place: Place | None = self
        while place is not None:
            keys.append(place.key)
            place = place.parent
        return "state" + "".join(f"[{short_repr(key)}]" for key in reversed(keys))


def names_below(name: str, keys: Sequence[object]) -> list[str]:
    """The names of the values with the keys `keys`, in the container called `name`."""
    if PLAIN_KEYS.issuperset(map(type, keys)):
        return [f"{name}.{key}" for key in keys]
    return [f"{name}.{key_text(key)}" for key in keys]


def section_place(section: str, rank: int | None = None) -> Place:
    """The place of a section. `rank`: for a section with one value per rank, the rank whose value it is."""
    return Place(section if rank is None else f"{section}@{rank}", section, None, 0, rank)


def check_shared(place: Place, value: object) -> None:
    """Raise UnsupportedStateError for a shard inside of a per-rank value."""
    if place.rank is not None:
        raise unsupported_error(place.name, value, "is a shard, but fs.PerRank takes complete values", "remove PerRank")


def strip_wrappers(key: str) -> str:
    """A module's dotted key without components that wrappers add, so that wrapped and bare modules agree."""
    return _WRAPPERS.sub("", key) if "module." in key or "_orig_mod." in key else key


def valid_name(name: str) -> bool:
    """Whether an index can store `name`: UTF-8, no NUL."""
    return "\0" not in name and valid_text(name)


def check_sections(state: object) -> tuple[str, ...]:
    """The state's section names; raises UnsupportedStateError for an invalid one."""
    if not isinstance(state, Mapping):
        raise UnsupportedStateError(
            "the state is not a mapping", found=type(state).__qualname__, next='pass {"model": model, ...}'
        )
    return tuple(_checked_sections(state))


def _checked_sections(sections: Iterable[object]) -> Iterable[str]:
    for section in sections:
        if type(section) is not str or not section or section[:2] == "__" or "@" in section or not valid_name(section):
            raise UnsupportedStateError(
                f"{section!r} cannot name a section of the state",
                expected="a non-empty str that does not begin with '__' and holds no '@' and no NUL",
                next="rename that entry of the state",
            )
        yield section


def type_name(own: type) -> str:
    """The name of a type, as it appears in errors and checkpoints."""
    return f"{own.__module__}.{own.__qualname__}"
