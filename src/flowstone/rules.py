"""Named exceptions to strict loading: what a load may overlook. Without rules a load is strict.

Patterns are shell patterns over tensor names (`model.head.*`), as in fnmatch, case-sensitive.
Everything that a rule allowed is listed in the load's report.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from flowstone.errors import ArgumentError

_STATE = ".state."


@dataclass(frozen=True, slots=True)
class Rename:
    """The stored path `source`, and all paths below it, are called `target` in the state.

    Also inside optimizer state, which is named after its parameter.
    """

    source: str
    target: str

    def __post_init__(self) -> None:
        _check_text("Rename", source=self.source, target=self.target)

    def apply(self, name: str) -> str:
        outer, state, inner = name.partition(_STATE)
        if state and self._moves(inner):
            return outer + state + self._moved(inner)
        return self._moved(name) if self._moves(name) else name

    def _moves(self, name: str) -> bool:
        return name == self.source or name.startswith(self.source + ".")

    def _moved(self, name: str) -> str:
        return self.target + name[len(self.source) :]


@dataclass(frozen=True, slots=True)
class Skip:
    """Tensors that match may be in the checkpoint and not in the state."""

    pattern: str

    def __post_init__(self) -> None:
        _check_text(type(self).__name__, pattern=self.pattern)

    def allows(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True)
class Init:
    """Tensors of the state that match may be absent from the checkpoint; they keep their values."""

    pattern: str

    def __post_init__(self) -> None:
        _check_text(type(self).__name__, pattern=self.pattern)

    def allows(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True)
class Cast:
    """Tensors that match may have another dtype in the checkpoint; values are converted."""

    pattern: str

    def __post_init__(self) -> None:
        _check_text(type(self).__name__, pattern=self.pattern)

    def allows(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


def _check_text(rule: str, **texts: object) -> None:
    """Raise ArgumentError for a pattern that is not text: it would match nothing, and the rule would do nothing."""
    for name, text in texts.items():
        if not isinstance(text, str) or not text:
            raise ArgumentError(
                f"{rule}: {name} {text!r:.60} is not a name", expected="a str: a dotted name, with * in a pattern",
                next=f"write one {rule} for each name or pattern",
            )


Rule = Rename | Skip | Init | Cast
