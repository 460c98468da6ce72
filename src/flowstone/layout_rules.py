"""Rules about how tensors are laid out: which are one in another program, and where each element of it lies there.

Each is declarative, knows its inverse, and checks what it is applied to. Names are patterns with placeholders
(`name_patterns.py`). The kinds are those of Universal Checkpointing (2406.18820): fused sub-parameters, experts,
padding; what is unique or replicated there has one name here (Rename), what is sharded by a dimension is one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

from flowstone.errors import ArgumentError
from flowstone.name_patterns import placeholders
from flowstone.rules import Rename, Rule, Skip, check_placeholders


@dataclass(frozen=True, slots=True)
class Split:
    """`source` becomes `targets`, cut along `dim`.

    parts     how the dimension is divided among the targets: sizes, or the same numbers without a common factor; none:
              equally
    groups    into as many groups the dimension is divided first, each of which has a share of every target, in order:
              the queries, key and value of each group of heads, as Megatron interleaves them
    required  whether it is an error if the rule names no tensor
    """

    source: str
    targets: tuple[str, ...]
    dim: int = 0
    parts: tuple[int, ...] = ()
    groups: int = 1
    required: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", _names(self, "targets"))
        object.__setattr__(self, "parts", _shares(self, len(self.targets)))
        _check(self)
        check_placeholders("Split", self.source, *self.targets)

    @property
    def inverse(self) -> Fuse:
        return Fuse(self.targets, self.source, self.dim, self.parts, self.groups, self.required)


@dataclass(frozen=True, slots=True)
class Fuse:
    """`sources` become `target`, one after the other along `dim`; the inverse of Split."""

    sources: tuple[str, ...]
    target: str
    dim: int = 0
    parts: tuple[int, ...] = ()
    groups: int = 1
    required: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", _names(self, "sources"))
        object.__setattr__(self, "parts", _shares(self, len(self.sources)))
        _check(self)
        check_placeholders("Fuse", self.target, *self.sources)

    @property
    def inverse(self) -> Split:
        return Split(self.target, self.sources, self.dim, self.parts, self.groups, self.required)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Dimension `axes[i]` of the tensor becomes dimension i."""

    name: str
    axes: tuple[int, ...] = (1, 0)
    required: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        _check(self)
        if sorted(self.axes) != list(range(len(self.axes))):
            raise ArgumentError(f"Transpose: {self.axes} is no order of dimensions", next="write (1, 0) for a matrix")

    @property
    def inverse(self) -> Transpose:
        return Transpose(self.name, tuple(self.axes.index(dim) for dim in range(len(self.axes))), self.required)


@dataclass(frozen=True, slots=True)
class Pad:
    """Dimension `dim` of the tensor, of `size` elements, becomes `padded` elements long; what is added is zero."""

    name: str
    size: int
    padded: int
    dim: int = 0
    required: bool = True

    def __post_init__(self) -> None:
        _check(self)

    @property
    def inverse(self) -> Unpad:
        return Unpad(self.name, self.size, self.padded, self.dim, self.required)


@dataclass(frozen=True, slots=True)
class Unpad:
    """Dimension `dim` of the tensor, of `padded` elements, is cut to the first `size`: the rest is left out."""

    name: str
    size: int
    padded: int
    dim: int = 0
    required: bool = True

    def __post_init__(self) -> None:
        _check(self)

    @property
    def inverse(self) -> Pad:
        return Pad(self.name, self.size, self.padded, self.dim, self.required)


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors that differ in a number, a placeholder that only `source` has, become one with a new dimension `dim`.

    The numbers have to be 0, 1, 2, ...: experts, or layers that are scanned.
    """

    source: str
    target: str
    dim: int = 0
    required: bool = True

    def __post_init__(self) -> None:
        _check(self)
        _check_number(self, self.source, self.target)

    @property
    def number(self) -> str:
        """The placeholder that counts."""
        return next(one for one in placeholders(self.source) if one not in placeholders(self.target))

    @property
    def inverse(self) -> Unstack:
        return Unstack(self.target, self.source, self.dim, self.required)


@dataclass(frozen=True, slots=True)
class Unstack:
    """A tensor becomes one for each index of its dimension `dim`; the inverse of Stack."""

    source: str
    target: str
    dim: int = 0
    required: bool = True

    def __post_init__(self) -> None:
        _check(self)
        _check_number(self, self.target, self.source)

    @property
    def number(self) -> str:
        """The placeholder that counts."""
        return next(one for one in placeholders(self.target) if one not in placeholders(self.source))

    @property
    def inverse(self) -> Stack:
        return Stack(self.target, self.source, self.dim, self.required)


LayoutRule: TypeAlias = Split | Fuse | Transpose | Pad | Unpad | Stack | Unstack
ConversionRule: TypeAlias = Rename | Skip | LayoutRule
KINDS: tuple[type[ConversionRule], ...] = (Rename, Skip, Split, Fuse, Transpose, Pad, Unpad, Stack, Unstack)


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules of one module's tensors, by their names below its section; by whole names where no tensor is in that.

    optional  Renames among them, by their sources, that may name nothing
    complete  whether each of the module's tensors has to be named by a rule
    prefix    what the names begin with, if they are whole ones; see `below`
    """

    rules: tuple[ConversionRule, ...]
    name: str = "rules"
    optional: tuple[str, ...] = ()
    complete: bool = False
    prefix: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        object.__setattr__(self, "optional", tuple(self.optional))
        for rule in self.rules:
            if not isinstance(rule, KINDS):
                raise ArgumentError(
                    f"{rule!r:.80} is no rule of a conversion", next="give fs.Rename, fs.Skip, fs.Split, fs.Fuse, ..."
                )
        unknown = set(self.optional) - {rule.source for rule in self.rules if isinstance(rule, Rename)}
        if unknown:
            raise ArgumentError(
                f"{self.name}: optional names no Rename: {sorted(unknown)!r:.80}", next="list sources of its Renames"
            )

    @property
    def inverse(self) -> RuleSet:
        """The rules that undo these, in the other order. Raises ArgumentError for a Skip, which nothing undoes."""
        undone: list[ConversionRule] = []
        for rule in reversed(self.rules):
            if isinstance(rule, Skip):
                raise ArgumentError(
                    f"{self.name}: nothing brings back what {rule} leaves out", next="invert the rules without it"
                )
            undone.append(rule.inverse)
        optional = tuple(r.target for r in self.rules if isinstance(r, Rename) and r.source in self.optional)
        return RuleSet(tuple(undone), self.name, optional, self.complete, self.prefix)

    def below(self, prefix: str) -> RuleSet:
        """The same of whole names that begin with `prefix`, such as "generator."; a set that has one stays as it is."""
        if self.prefix is not None:
            return self
        return replace(
            self, rules=tuple(around(rule, prefix) for rule in self.rules), prefix=prefix,
            optional=tuple(prefix + name for name in self.optional),
        )


LoadRule: TypeAlias = Rule | LayoutRule | RuleSet
"""What a load takes."""

GivenRules: TypeAlias = ConversionRule | RuleSet | Sequence[ConversionRule | RuleSet]
"""What conversions take."""

_NAME_FIELDS = ("source", "target", "name", "pattern")


_AnyRule = TypeVar("_AnyRule", bound=ConversionRule)


def around(rule: _AnyRule, prefix: str, suffix: str = "") -> _AnyRule:
    """The same rule of names that begin with `prefix` and end with `suffix`."""
    changes: dict[str, Any] = {}
    for field in fields(rule):
        value = getattr(rule, field.name)
        if field.name in _NAME_FIELDS:
            changes[field.name] = prefix + value + suffix
        elif field.name in ("sources", "targets"):
            changes[field.name] = tuple(prefix + one + suffix for one in value)
    return replace(rule, **changes)


def _names(rule: Split | Fuse, field: str) -> tuple[str, ...]:
    given = getattr(rule, field)
    if isinstance(given, str) or not isinstance(given, Sequence) or not given or len(set(given)) < len(given):
        raise ArgumentError(f"{type(rule).__name__}: {field} {given!r:.80} are no names, each once", next="list them")
    return tuple(given)


def _shares(rule: Split | Fuse, count: int) -> tuple[int, ...]:
    """The parts, in full."""
    given = tuple(rule.parts) or (1,) * count
    if len(given) != count or not all(type(part) is int and part > 0 for part in given):
        raise ArgumentError(f"{type(rule).__name__}: parts {given} do not divide {count} tensors",
                            next="give one number above 0 for each")
    return given


def _check(rule: LayoutRule) -> None:
    """Raise ArgumentError for a name that is no text, or a number that counts nothing."""
    kind = type(rule).__name__
    least = {"dim": 0, "groups": 1, "size": 0, "padded": 0}
    for field in fields(rule):
        value = getattr(rule, field.name)
        names = value if field.name in ("sources", "targets") else (value,) if field.name in _NAME_FIELDS else ()
        if not all(isinstance(one, str) and one for one in names):
            raise ArgumentError(f"{kind}: {field.name} {value!r:.60} is not a name", next="write a dotted name")
        if field.name in least and (type(value) is not int or value < least[field.name]):
            raise ArgumentError(
                f"{kind}: {field.name} {value!r:.40} is no number", expected=f"{least[field.name]} or more",
                next="count dimensions and elements from 0",
            )
    if type(rule.required) is not bool:
        raise ArgumentError(f"{kind}: required {rule.required!r:.40} is not True or False", next="write one of them")
    if isinstance(rule, Pad | Unpad) and rule.padded < rule.size:
        raise ArgumentError(f"{kind}: {rule.padded} elements are fewer than {rule.size}", next="exchange the two")


def _check_number(rule: Stack | Unstack, many: str, one: str) -> None:
    inner, outer = placeholders(many), placeholders(one)
    if len(set(inner)) < len(inner) or len(set(outer)) < len(outer) or len(set(inner) - set(outer)) != 1 or set(
        outer
    ) - set(inner):
        raise ArgumentError(
            f"{type(rule).__name__}: {many!r} needs all placeholders of {one!r} and one more, which counts",
            next="write 'experts.{e}.w1' and 'experts.w1'",
        )


__all__ = [
    "KINDS", "ConversionRule", "Fuse", "GivenRules", "LayoutRule", "LoadRule", "Pad", "RuleSet", "Split", "Stack",
    "Transpose", "Unpad", "Unstack",
]
