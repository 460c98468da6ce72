"""Rules of saves (Quantize) that match no tensor: a mistyped rule would silently change nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from flowstone.errors import NoTensorError
from flowstone.log import log

if TYPE_CHECKING:
    from flowstone.codecs.quantize import Quantize
    from flowstone.state import StateDescription

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number between dots in a name, such as 3 in "layers.3.weight"
_COMPARED_MAX, _TOLD = 500, 5
_NESTED_MAX = 3  # an optimizer may be inside of at most so many nested containers


class UnmatchedRules:
    """The rules of one Checkpointer that have matched no tensor of any save yet.

    A rule that matches nothing is refused. But an optimizer has no tensors before its first step. So a rule that may
    match an optimizer's tensors later is logged once, and checked again by the next save.
    """

    def __init__(self, rules: Sequence[Quantize]) -> None:
        self._rules, self._left, self._told = tuple(rules), list(rules), set[str]()
        self._layout: object = None  # the layout that was last checked for tensors that share memory
        self._seen: object = None
        self._optimizers: tuple[str, ...] = ()  # sections with an optimizer

    @property
    def any_left(self) -> bool:
        return bool(self._left)

    def check_described(self, described: StateDescription, *, is_all: bool) -> None:
        """Refuse a rule that rounds a tensor whose memory is shared. Record which sections have an optimizer. If this
        rank has all tensors (`is_all`), call `check`.
        """
        if self._rules and described.layout is not self._layout:
            from flowstone.codecs.rounded_views import refuse_rounded_views  # imported here: only rules need it

            refuse_rounded_views(self._rules, described)
            self._layout = described.layout
        if not self._left:
            return
        sections = (*described.objects.items(), *described.per_rank.items())
        with_groups = [section for section, value in sections if _has_groups(value, _NESTED_MAX)]
        self._optimizers = tuple(dict.fromkeys([*self._optimizers, *with_groups]))
        if is_all:
            names = described.pieces.tensors.names
            self.check(names, names)

    def check(self, plan: object, names: Sequence[str]) -> None:
        """Match the rules with the names of all ranks' tensors. `plan`: identifies the set of names; nothing is done if
        it was checked before.

        raises  NoTensorError for a rule that matches nothing
        """
        if not self._left or plan == self._seen:
            return
        self._left = [rule for rule in self._left if not any(map(rule.matches, names))]
        none_yet = [
            section for section in self._optimizers if not any(name.startswith(_begins(section)) for name in names)
        ]
        for rule in self._left:
            fresh = next((section for section in none_yet if _reaches(rule.pattern, section)), None)
            if fresh is None:
                raise NoTensorError(
                    f"{rule} matches no tensor of the state", found=", ".join(_nearest(rule.pattern, names)) or "none",
                    next="correct the pattern (`flowstone show` lists the names), or leave the rule out",
                )
            if rule.pattern not in self._told:
                self._told.add(rule.pattern)
                log.warning(
                    "%s matches no tensor yet: the optimizer '%s' creates its tensors in its first step", rule, fresh
                )
        self._seen = plan


def _has_groups(value: object, depth: int) -> bool:
    if isinstance(value, Mapping):
        return "param_groups" in value or any(_has_groups(item, depth - 1) for item in value.values() if depth)
    return isinstance(value, list) and any(_has_groups(item, depth - 1) for item in value if depth)


def _reaches(pattern: str, section: str) -> bool:
    """Whether `pattern` could match a name in `section`."""
    begin = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return begin.startswith(_begins(section)) or any(prefix.startswith(begin) for prefix in _begins(section))


def _begins(section: str) -> tuple[str, str]:
    """The two prefixes that names of a section's tensors may have: one for tensors that ranks share, one for tensors of
    a single rank.
    """
    return f"{section}.", f"{section}@"


def _nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """The names most similar to `pattern`, for an error message. Numbers in them are replaced by *."""
    from difflib import get_close_matches  # imported here: only this error needs it

    kinds = list(dict.fromkeys(_NUMBER.sub("*", name) for name in names))
    return get_close_matches(pattern, kinds[:_COMPARED_MAX], _TOLD, cutoff=0)
