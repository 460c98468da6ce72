"""Named exceptions to strict loading: what a load may overlook. Without rules a load is strict.

Patterns are shell patterns over tensor names (`model.head.*`), as in fnmatch, case-sensitive.
Everything that a rule allowed is listed in the load's report.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from flowstone.errors import ArgumentError
from flowstone.name_patterns import bind_path, fill, placeholders

STATE = ".state."
"""What follows an optimizer in the names of its slots; the parameter's name is next."""


@dataclass(frozen=True, slots=True)
class Rename:
    """The stored path `source`, and all paths below it, are called `target` in the state.

    Also inside optimizer state, which is named after its parameter. Both may have placeholders, the same ones:
    `Rename("decoder.layers.{n}.mlp", "h.{n}.mlp")`.
    """

    source: str
    target: str

    def __post_init__(self) -> None:
        check_text("Rename", source=self.source, target=self.target)
        check_placeholders("Rename", self.source, self.target)

    def apply(self, name: str) -> str:
        moved = self.moved(name)
        return name if moved is None else moved

    def moved(self, name: str) -> str | None:
        """The new name; None for a name that the rule does not speak of."""
        outer, state, inner = name.partition(STATE)
        moved = self._moved(inner) if state else None
        return self._moved(name) if moved is None else outer + state + moved

    def _moved(self, name: str) -> str | None:
        if "{" in self.source:
            found = bind_path(self.source, name)
            return None if found is None else fill(self.target, found[0]) + found[1]
        is_named = name == self.source or name.startswith(self.source + ".")
        return self.target + name[len(self.source) :] if is_named else None

    @property
    def inverse(self) -> Rename:
        return Rename(self.target, self.source)


@dataclass(frozen=True, slots=True)
class Skip:
    """Tensors that match may be in the checkpoint and not in the state."""

    pattern: str

    def __post_init__(self) -> None:
        check_text(type(self).__name__, pattern=self.pattern)

    def allows(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True)
class Init:
    """Tensors of the state that match may be absent from the checkpoint; they keep their values."""

    pattern: str

    def __post_init__(self) -> None:
        check_text(type(self).__name__, pattern=self.pattern)

    def allows(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True)
class Cast:
    """Tensors that match may have another dtype in the checkpoint; values are converted."""

    pattern: str

    def __post_init__(self) -> None:
        check_text(type(self).__name__, pattern=self.pattern)

    def allows(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


def check_text(rule: str, **texts: object) -> None:
    """Raise ArgumentError for a pattern that is not text: it would match nothing, and the rule would do nothing."""
    for name, text in texts.items():
        if not isinstance(text, str) or not text:
            raise ArgumentError(
                f"{rule}: {name} {text!r:.60} is not a name", expected="a str: a dotted name, with * in a pattern",
                next=f"write one {rule} for each name or pattern",
            )


def check_placeholders(rule: str, source: str, *targets: str) -> None:
    """Raise ArgumentError unless all patterns have the same placeholders, each once."""
    known = placeholders(source)
    for pattern in (source, *targets):
        found = placeholders(pattern)
        if sorted(set(found)) != sorted(found) or set(found) != set(known):
            raise ArgumentError(
                f"{rule}: {source!r} and {pattern!r} have other placeholders", found=f"{sorted(found)}",
                expected=f"{sorted(set(known))}, each once",
                next="write the same ones on both sides, so that the rule can be inverted",
            )


Rule = Rename | Skip | Init | Cast
