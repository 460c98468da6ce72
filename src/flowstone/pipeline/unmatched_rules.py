"""Rules of saves (Quantize) that name no tensor: one that is mistyped would change nothing, and be silent about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from flowstone.errors import NoTensorError
from flowstone.log import log

if TYPE_CHECKING:
    from flowstone.quantize import Quantize
    from flowstone.state import Described

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a dotted name
_COMPARED_MAX, _TOLD = 500, 5
_NESTED_MAX = 3  # containers that an optimizer may be in


class UnmatchedRules:
    """The rules of one Checkpointer that have named no tensor of any save yet.

    One that names nothing is refused, as rules about layouts are. But an optimizer has no tensors before its first
    step: where the pattern may mean those, that is told, once, and looked at again.
    """

    def __init__(self, rules: Sequence[Quantize]) -> None:
        self._rules, self._left, self._told = tuple(rules), list(rules), set[str]()
        self._layout: object = None  # that was last looked at for views
        self._seen: object = None
        self._optimizers: tuple[str, ...] = ()  # sections that have some; one more save may begin before a commit

    @property
    def any_left(self) -> bool:
        return bool(self._left)

    def look(self, described: Described, *, is_all: bool) -> None:
        """Refuse views that a rule rounds; note which sections have an optimizer; and `check`, if no other rank has
        more tensors.
        """
        if self._rules and described.layout is not self._layout:
            from flowstone.pipeline.rounded_views import refuse_rounded_views  # imported here: only rules need it

            refuse_rounded_views(self._rules, described)
            self._layout = described.layout
        if not self._left:
            return
        sections = (*described.objects.items(), *described.per_rank.items())
        found = [section for section, value in sections if _has_groups(value, _NESTED_MAX)]
        self._optimizers = tuple(dict.fromkeys([*self._optimizers, *found]))
        if is_all:
            names = described.pieces.tensors.names
            self.check(names, names)

    def check(self, plan: object, names: Sequence[str]) -> None:
        """Look for the rules among the names of all ranks' tensors. `plan`: equal where the names are.

        raises  NoTensorError for a rule that names nothing
        """
        if not self._left or plan == self._seen:
            return
        self._left = [rule for rule in self._left if not any(map(rule.matches, names))]
        none_yet = [one for one in self._optimizers if not any(name.startswith(_begins(one)) for name in names)]
        for rule in self._left:
            fresh = next((section for section in none_yet if _reaches(rule.pattern, section)), None)
            if fresh is None:
                raise NoTensorError(
                    f"{rule} names no tensor of the state", found=", ".join(_nearest(rule.pattern, names)) or "none",
                    next="correct the pattern: names are those that `flowstone show` lists; or leave the rule out",
                )
            if rule.pattern not in self._told:
                self._told.add(rule.pattern)
                log.warning("%s names no tensor yet: '%s' gets its own with its first step", rule, fresh)
        self._seen = plan


def _has_groups(value: object, depth: int) -> bool:
    if isinstance(value, Mapping):
        return "param_groups" in value or any(_has_groups(one, depth - 1) for one in value.values() if depth)
    return isinstance(value, list) and any(_has_groups(one, depth - 1) for one in value if depth)


def _reaches(pattern: str, section: str) -> bool:
    """Whether a name in that section could match."""
    begin = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return begin.startswith(_begins(section)) or any(one.startswith(begin) for one in _begins(section))


def _begins(section: str) -> tuple[str, str]:
    """How names of its tensors begin, and of a rank's own."""
    return f"{section}.", f"{section}@"


def _nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that look most like it, with * in the place of numbers."""
    from difflib import get_close_matches  # imported here: only this error needs it

    kinds = list(dict.fromkeys(_NUMBER.sub("*", name) for name in names))
    return get_close_matches(pattern, kinds[:_COMPARED_MAX], _TOLD, cutoff=0)
