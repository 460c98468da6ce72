"""Layout rules: how the tensors of one program correspond to those of another that splits or fuses them differently.

Each rule is declarative, has an inverse, and checks the tensors to which it is applied. Names are patterns with
placeholders (`rules/name_patterns.py`). The rules cover the cases of Universal Checkpointing (arXiv 2406.18820): fused
sub-parameters, experts, padding. What that paper calls unique and replicated parameters needs only a Rename here.
Parameters that are sharded along a dimension are one tensor in a checkpoint, and need no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar, get_args

from flowstone.errors import ArgumentError
from flowstone.rules.load_rules import Rename, Rule, Skip, check_placeholders, check_repeats
from flowstone.rules.name_patterns import placeholders


@dataclass(frozen=True, slots=True)
class Split:
    """`source` becomes `targets`, cut along `dim`.

    parts     how the dimension is divided among the targets: sizes, or their ratio; empty: equally
    groups    the dimension is first divided into this many groups; each contains a part of every target, in order.
              Megatron stores queries, key and value of each group of attention heads in this way
    required  whether it is an error if the rule matches no tensor
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
    """The tensors `sources` become one tensor `target`, concatenated along `dim`. The inverse of Split."""

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
            raise ArgumentError(
                f"Transpose: axes {self.axes} must be a permutation of the dimensions", next="write (1, 0) for a matrix"
            )

    @property
    def inverse(self) -> Transpose:
        return Transpose(self.name, tuple(self.axes.index(dim) for dim in range(len(self.axes))), self.required)


@dataclass(frozen=True, slots=True)
class Pad:
    """Dimension `dim` of the tensor is extended from `size` to `padded` elements; the new elements are zero."""

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
    """Dimension `dim` of the tensor is cut from `padded` elements to the first `size` elements."""

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
    """Tensors whose names differ only in a number, such as that of an expert or a layer, become one tensor with a new
    dimension `dim`.

    The placeholder that `source` has and `target` lacks stands for this number. The numbers must be 0, 1, 2, ...
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
        """The name of the placeholder for the number in which the names differ, such as `e` in `experts.{e}.w1`."""
        return next(name for name in placeholders(self.source) if name not in placeholders(self.target))

    @property
    def inverse(self) -> Unstack:
        return Unstack(self.target, self.source, self.dim, self.required)


@dataclass(frozen=True, slots=True)
class Unstack:
    """One tensor becomes several: one for each index of its dimension `dim`. The inverse of Stack."""

    source: str
    target: str
    dim: int = 0
    required: bool = True

    def __post_init__(self) -> None:
        _check(self)
        _check_number(self, self.target, self.source)

    @property
    def number(self) -> str:
        """The name of the placeholder for the index, such as `e` in `experts.{e}.w1`."""
        return next(name for name in placeholders(self.target) if name not in placeholders(self.source))

    @property
    def inverse(self) -> Stack:
        return Stack(self.target, self.source, self.dim, self.required)


LayoutRule: TypeAlias = Split | Fuse | Transpose | Pad | Unpad | Stack | Unstack
ConversionRule: TypeAlias = Rename | Skip | LayoutRule


def kinds() -> tuple[type, ...]:
    """The classes of the rules in this module, which a load accepts besides those in `rules/load_rules.py`."""
    return RuleSet, *get_args(LayoutRule)


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules for the tensors of one module. The rules use names inside of the module, without its key in the state; or,
    if `prefix` is set, full names.

    optional  the `source` of each Rename that may match no tensor
    complete  whether each of the module's tensors must be matched by a rule
    prefix    prefix of all names, if they are full names; see `below`
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
            if not isinstance(rule, ConversionRule):
                raise ArgumentError(
                    f"{rule!r:.80} is not a conversion rule", next="give fs.Rename, fs.Skip, fs.Split, fs.Fuse, ..."
                )
        unknown = set(self.optional) - {rule.source for rule in self.rules if isinstance(rule, Rename)}
        if unknown:
            raise ArgumentError(
                f"{self.name}: `optional` contains {sorted(unknown)!r:.80}, but no fs.Rename rule has such a source",
                next="remove these names from `optional`, or correct them: each must be the source of an fs.Rename",
            )

    @property
    def inverse(self) -> RuleSet:
        """The inverse rules, in reverse order. Raises ArgumentError for a Skip, which has no inverse."""
        undone: list[ConversionRule] = []
        for rule in reversed(self.rules):
            if isinstance(rule, Skip):
                raise ArgumentError(
                    f"{self.name}: {rule} has no inverse: it drops tensors",
                    next="remove this rule, then invert the others",
                )
            undone.append(rule.inverse)
        optional = tuple(r.target for r in self.rules if isinstance(r, Rename) and r.source in self.optional)
        return RuleSet(tuple(undone), self.name, optional, self.complete, self.prefix)

    def below(self, prefix: str) -> RuleSet:
        """The same rules, for full names that begin with `prefix`, such as "generator.". A RuleSet that already has a
        prefix is returned unchanged.
        """
        if self.prefix is not None:
            return self
        return replace(
            self, rules=tuple(with_affixes(rule, prefix) for rule in self.rules), prefix=prefix,
            optional=tuple(prefix + name for name in self.optional),
        )


LoadRule: TypeAlias = Rule | LayoutRule | RuleSet
"""The rules that a load accepts."""
GivenRules: TypeAlias = ConversionRule | RuleSet | Sequence[ConversionRule | RuleSet]
"""The rules that conversions accept."""

_NAME_FIELDS = ("source", "target", "name", "pattern")
_AnyRule = TypeVar("_AnyRule", bound=ConversionRule)


def with_affixes(rule: _AnyRule, prefix: str, suffix: str = "") -> _AnyRule:
    """The same rule, with `prefix` before and `suffix` after each of its names."""
    changes: dict[str, Any] = {}
    for field in fields(rule):
        value = getattr(rule, field.name)
        if field.name in _NAME_FIELDS:
            changes[field.name] = prefix + value + suffix
        elif field.name in ("sources", "targets"):
            changes[field.name] = tuple(prefix + name + suffix for name in value)
    return replace(rule, **changes)


def _names(rule: Split | Fuse, field: str) -> tuple[str, ...]:
    given = getattr(rule, field)
    if isinstance(given, str) or not isinstance(given, Sequence) or not given or len(set(given)) < len(given):
        raise ArgumentError(
            f"{type(rule).__name__}: {field} {given!r:.80} must be a list of distinct names",
            next="write ['a.weight', 'b.weight']",
        )
    return tuple(given)


def _shares(rule: Split | Fuse, count: int) -> tuple[int, ...]:
    """The `parts` of a rule with `count` tensors; by default, equal parts."""
    given = tuple(rule.parts) or (1,) * count
    if len(given) != count or not all(type(part) is int and part > 0 for part in given):
        raise ArgumentError(f"{type(rule).__name__}: parts {given} must be {count} numbers above 0",
                            next="give one number for each tensor")
    return given


def _check(rule: LayoutRule) -> None:
    """Raise ArgumentError if a name is empty, is not a string, or has a placeholder twice, or if a number is out of
    range.
    """
    kind = type(rule).__name__
    least = {"dim": 0, "groups": 1, "size": 0, "padded": 0}
    for field in fields(rule):
        value = getattr(rule, field.name)
        names = value if field.name in ("sources", "targets") else (value,) if field.name in _NAME_FIELDS else ()
        if not all(isinstance(name, str) and name for name in names):
            raise ArgumentError(
                f"{kind}: {field.name} {value!r:.60} is not a name",
                next="write the name of a tensor, such as 'layers.0.weight'",
            )
        check_repeats(kind, *names)
        if field.name in least and (type(value) is not int or value < least[field.name]):
            raise ArgumentError(
                f"{kind}: {field.name} must be at least {least[field.name]}, not {value!r:.40}",
                next="give an int; dimensions are counted from 0",
            )
    if type(rule.required) is not bool:
        raise ArgumentError(f"{kind}: required must be a bool, not {rule.required!r:.40}", next="write True or False")
    if isinstance(rule, Pad | Unpad) and rule.padded < rule.size:
        raise ArgumentError(f"{kind}: padded {rule.padded} is less than size {rule.size}", next="give padded >= size")


def _check_number(rule: Stack | Unstack, many: str, stacked: str) -> None:
    inner, outer = set(placeholders(many)), set(placeholders(stacked))
    if len(inner - outer) != 1 or outer - inner:
        raise ArgumentError(
            f"{type(rule).__name__}: {many!r} must contain each placeholder of {stacked!r} exactly once, and exactly "
            "one additional placeholder, for the number (such as an expert's) that distinguishes the separate tensors",
            next="write for example 'experts.{e}.w1' for the separate tensors, and 'experts.w1' for the stacked one",
        )
