"""Rules for differences that a load allows. Without rules, state and checkpoint must match exactly.

Patterns are shell patterns of tensor names (`model.head.*`), as in fnmatch, case-sensitive.
The load's report lists everything that a rule allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from flowstone.errors import ArgumentError
from flowstone.rules.name_patterns import bind_path, fill, placeholders

STATE = ".state."
"""Separates the optimizer's name from the parameter's in the name of optimizer state."""


@dataclass(frozen=True, slots=True)
class Rename:
    """The stored path `source` is called `target` in the state. Paths that begin with `source` are renamed, too.

    Optimizer state, which is named after its parameter, is also renamed. Both paths may have the same placeholders:
    `Rename("decoder.layers.{n}.mlp", "h.{n}.mlp")`.
    """

    source: str
    target: str

    def __post_init__(self) -> None:
        check_text("Rename", source=self.source, target=self.target)
        check_placeholders("Rename", self.source, self.target)

    def apply(self, name: str) -> str:
        new_name = self.moved(name)
        return name if new_name is None else new_name

    def moved(self, name: str) -> str | None:
        """The new name; None if the rule does not apply to this name."""
        outer, state, inner = name.partition(STATE)
        inner_name = self._moved(inner) if state else None
        return self._moved(name) if inner_name is None else outer + state + inner_name

    def _moved(self, name: str) -> str | None:
        if "{" in self.source:
            bound = bind_path(self.source, name)
            return None if bound is None else fill(self.target, bound[0]) + bound[1]
        is_named = name == self.source or name.startswith(self.source + ".")
        return self.target + name[len(self.source) :] if is_named else None

    @property
    def inverse(self) -> Rename:
        return Rename(self.target, self.source)


@dataclass(frozen=True, slots=True)
class Skip:
    """Tensors of the checkpoint that match `pattern` may be missing in the state; they are not read."""

    pattern: str

    def __post_init__(self) -> None:
        check_text(type(self).__name__, pattern=self.pattern)

    def allows(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True)
class Init:
    """Tensors of the state that match `pattern` may be missing in the checkpoint; they keep their values."""

    pattern: str

    def __post_init__(self) -> None:
        check_text(type(self).__name__, pattern=self.pattern)

    def allows(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True)
class Cast:
    """Tensors that match `pattern` may have another dtype in the checkpoint; their values are converted."""

    pattern: str

    def __post_init__(self) -> None:
        check_text(type(self).__name__, pattern=self.pattern)

    def allows(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


def check_text(rule: str, **texts: object) -> None:
    """Raise ArgumentError for a pattern that is empty or not a string: the rule would never apply."""
    for name, text in texts.items():
        if not isinstance(text, str) or not text:
            raise ArgumentError(
                f"{rule}: {name} {text!r:.60} is not a name", expected="a str: a dotted name, with * in a pattern",
                next=f"write one {rule} for each name or pattern",
            )


def check_placeholders(rule: str, source: str, *targets: str) -> None:
    """Raise ArgumentError unless all patterns have the same placeholders, each once."""
    check_repeats(rule, source, *targets)
    expected = sorted(placeholders(source))
    for pattern in targets:
        actual = sorted(placeholders(pattern))
        if actual != expected:
            raise ArgumentError(
                f"{rule}: {source!r} and {pattern!r} have different placeholders", found=f"{actual}",
                expected=f"{expected}",
                next="use the same placeholders on both sides, so that the rule can be inverted",
            )


def check_repeats(rule: str, *patterns: str) -> None:
    """Raise ArgumentError if a pattern has a placeholder twice."""
    for pattern in patterns:
        actual = placeholders(pattern)
        if len(set(actual)) < len(actual):
            raise ArgumentError(
                f"{rule}: the pattern {pattern!r} has a placeholder twice", found=f"{sorted(actual)}",
                next="give each placeholder of a pattern a name of its own, as in 'layers.{n}.experts.{e}'",
            )


Rule = Rename | Skip | Init | Cast
