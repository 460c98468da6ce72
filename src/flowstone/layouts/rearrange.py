"""Applies rules to a source's tensors: takes and returns tensors by name, and copies no bytes.

Each rule is applied to the result of the previous one. If a rule cannot be applied, an error names the rule: it matches
no tensor, two tensors would get the same name, or shapes do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from flowstone.config import NAMES_LISTED_MAX, UNSTACKED_MAX
from flowstone.errors import CollisionError, MismatchError, NoTensorError
from flowstone.layouts.layout_rules import (
    ConversionRule,
    Fuse,
    LayoutRule,
    Pad,
    RuleSet,
    Split,
    Stack,
    Transpose,
    Unpad,
    Unstack,
    with_affixes,
)
from flowstone.layouts.views import add_dimension, concatenate, drop_dimension, narrow, transpose, zeros
from flowstone.rules.load_rules import STATE, Rename, Skip
from flowstone.rules.name_patterns import bind, fill
from flowstone.table.dtype import DTYPES
from flowstone.table.stored import SourceTensor

Tensors: TypeAlias = Mapping[str, SourceTensor]


class Followers(msgspec.Struct, frozen=True):
    """Optimizer state that is rearranged like its parameters. A slot is one state tensor of a parameter, such as
    `exp_avg`.

    sections  tells for a section's name whether the state of the optimizer in this section is rearranged
    equal     whether two stored tensors are known to have the same bytes
    """

    sections: Callable[[str], bool]
    equal: Callable[[SourceTensor, SourceTensor], bool]


def _is_never(_: str) -> bool:
    return False


class Origin(msgspec.Struct, frozen=True):
    """Where the tensors come from: a checkpoint, and a prefix that its names have and the target's names lack.

    followers   optimizer state that is rearranged like its parameters; None: rules change only tensors that they name
    is_spare    tells for a tensor's name whether a complete RuleSet need not match it
    is_lenient  whether a Rename outside of a RuleSet may match no tensor: it may be meant for a value of another kind
    """

    location: str
    prefix: str = ""
    followers: Followers | None = None
    is_spare: Callable[[str], bool] = _is_never
    is_lenient: bool = False


class _Match(msgspec.Struct, frozen=True):
    """Tensors that a rule combines, by their names, and the names of its results.

    parameters  if the tensors are optimizer state: their parameters; otherwise None
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    parameters: tuple[SourceTensor, ...] | None = None


def rearrange(tensors: Tensors, rules: Sequence[ConversionRule | RuleSet], origin: Origin) -> Tensors:
    """Apply all rules. Returns the tensors by their names after the rules. A tensor that is made from others takes the
    position of the first of them.

    raises  NoTensorError   a rule matches no tensor
            CollisionError  two tensors get the same name
            MismatchError   a tensor does not fit a rule, or a complete RuleSet has no rule for it
    """
    for rule in rules:
        if isinstance(rule, RuleSet):
            tensors = _apply_set(tensors, rule, origin)
        elif not isinstance(rule, Skip):
            required = not (isinstance(rule, Rename) and origin.is_lenient)
            tensors, _ = _apply_rule(tensors, rule, origin, required=required)
    return tensors


def _apply_set(tensors: Tensors, rules: RuleSet, origin: Origin) -> Tensors:
    named: set[str] = set()
    for rule in rules.rules:
        if not isinstance(rule, Skip):
            required = rule.source not in rules.optional if isinstance(rule, Rename) else rule.required
            tensors, made = _apply_rule(tensors, rule, origin, required=required)
            named |= made
    left = [name for name in tensors if name not in named and not origin.is_spare(name)]
    if rules.complete and left:
        raise MismatchError(
            f"{rules.name} has no rule for {len(left)} tensors of {origin.location}", differences=tuple(left),
            found=", ".join(left[:NAMES_LISTED_MAX]) + ", ..." * (len(left) > NAMES_LISTED_MAX),
            next="omit them with --skip PATTERN (fs.Skip), or write rules for them",
        )
    return tensors


def _apply_rule(
    tensors: Tensors, rule: Rename | LayoutRule, origin: Origin, *, required: bool
) -> tuple[Tensors, set[str]]:
    """Apply one rule. Returns the tensors by their names after it, and the names of the rule's results."""
    matches = list(_matches(rule, tensors))
    if not matches and required and (isinstance(rule, Rename) or rule.required):
        raise NoTensorError(
            f"{rule} matches no tensor of {origin.location}",
            found=", ".join(list(tensors)[:NAMES_LISTED_MAX]) + ", ...",
            next="correct the rule, or set required=false if it may match nothing",
        )
    if origin.followers is not None and not isinstance(rule, Rename):
        matches += _followers(rule, tensors, origin.followers)
    by_source = {name: match for match in matches for name in match.sources}
    results = _NamedTensors(origin.prefix)
    made: dict[tuple[int, ...], Sequence[SourceTensor]] = {}
    for name, tensor in tensors.items():
        match = by_source.get(name)
        if match is None:
            results.add(name, tensor, name)
        elif match.sources[0] == name:
            sources = [tensors[source] for source in match.sources]
            key = tuple(map(id, sources))  # tied tensors have the same sources, and so stay tied
            if key not in made:
                made[key] = (
                    _make(rule, match, sources) if match.parameters is None or isinstance(rule, Rename) else
                    _make_slots(rule, match, sources, match.parameters, origin.followers)
                )
            for target, result in zip(match.targets, made[key], strict=True):
                results.add(target, result, name)
    return results.tensors, {target for match in matches for target in match.targets}


class _NamedTensors:
    """Collects tensors by their new names. Raises CollisionError if two tensors get the same name."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._sources: dict[str, str] = {}
        self.tensors: dict[str, SourceTensor] = {}

    def add(self, name: str, tensor: SourceTensor, source: str) -> None:
        if name in self.tensors:
            raise CollisionError(
                f"two tensors of the target would be called {name.removeprefix(self._prefix)!r}",
                found=f"{self._sources[name]!r} and {source!r}", next="rename or skip one of the two tensors",
            )
        self.tensors[name], self._sources[name] = tensor, source


def _matches(rule: Rename | LayoutRule, names: Tensors) -> Iterator[_Match]:
    """Yield each group of tensors that a rule combines into its results."""
    if isinstance(rule, Rename):
        for name in names:
            new_name = rule.moved(name)
            if new_name is not None:
                yield _Match((name,), (new_name,))
    elif isinstance(rule, Transpose | Pad | Unpad):
        yield from (_Match((name,), (name,)) for name in names if bind(rule.name, name) is not None)
    elif isinstance(rule, Split):
        for name in names:
            if (bindings := bind(rule.source, name)) is not None:
                yield _Match((name,), tuple(fill(target, bindings) for target in rule.targets))
    elif isinstance(rule, Fuse):
        yield from _fused(rule, names)
    elif isinstance(rule, Stack):
        yield from _stacked(rule, names)
    else:
        for name, tensor in names.items():
            if (bindings := bind(rule.source, name)) is not None:
                _check_dim(rule, name, tensor)
                if tensor.shape[rule.dim] > UNSTACKED_MAX:
                    raise _unlike(rule, name, f"at most {UNSTACKED_MAX} tensors", f"shape {tensor.shape}")
                numbers = range(tensor.shape[rule.dim])
                targets = (fill(rule.target, {**bindings, rule.number: str(number)}) for number in numbers)
                yield _Match((name,), tuple(targets))


def _fused(rule: Fuse, names: Tensors) -> Iterator[_Match]:
    groups: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for name in names:
        for source in rule.sources:
            if (bindings := bind(source, name)) is not None:
                groups.setdefault(tuple(sorted(bindings.items())), {})[source] = name
    for key, parts in groups.items():
        missing = [fill(source, dict(key)) for source in rule.sources if source not in parts]
        if missing:
            raise MismatchError(
                f"{fill(rule.target, dict(key))!r} cannot be fused, because some of its parts are missing",
                missing=", ".join(missing), found=", ".join(parts.values()),
                next="correct the rule, or skip the tensors that were found",
            )
        yield _Match(tuple(parts[source] for source in rule.sources), (fill(rule.target, dict(key)),))


def _stacked(rule: Stack, names: Tensors) -> Iterator[_Match]:
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        if (bindings := bind(rule.source, name)) is not None:
            groups.setdefault(fill(rule.target, bindings), {})[bindings[rule.number]] = name
    for target, members in groups.items():
        numbers = [str(number) for number in range(len(members))]
        if set(numbers) != set(members):
            missing = next(number for number in numbers if number not in members)
            raise MismatchError(
                f"{target!r} cannot be stacked: number {missing} is missing", found=", ".join(sorted(members))[:200],
                next="correct the rule: all numbers from 0 on must exist",
            )
        yield _Match(tuple(members[number] for number in numbers), (target,))


def _followers(rule: LayoutRule, tensors: Tensors, followers: Followers) -> Iterator[_Match]:
    """Yield each group of optimizer state tensors (slots) that a rule combines: those of the parameters that the rule
    matches.
    """
    slots: dict[tuple[str, str], dict[str, SourceTensor]] = {}
    for name in tensors:
        outer, is_slot, inner = name.partition(STATE)
        if is_slot and followers.sections(outer):
            path, _, slot = inner.rpartition(".")
            slots.setdefault((outer, slot), {})[name] = tensors.get(path, _NO_PARAMETER)
    for (outer, slot), parameters in slots.items():
        for match in _matches(with_affixes(rule, f"{outer}{STATE}", f".{slot}"), parameters):
            yield _Match(match.sources, match.targets, tuple(parameters[name] for name in match.sources))


_NO_PARAMETER = SourceTensor("", DTYPES["uint8"], (), ())
"""Stands for a parameter that the checkpoint does not have."""


def _make_slots(
    rule: LayoutRule, match: _Match, slots: Sequence[SourceTensor], parameters: Sequence[SourceTensor],
    followers: Followers | None,
) -> Sequence[SourceTensor]:
    """Apply a rule to optimizer state tensors (slots). A slot with the parameter's shape is changed like the parameter;
    a slot with a single number keeps it.
    """
    for name, slot, parameter in zip(match.sources, slots, parameters, strict=True):
        if parameter is _NO_PARAMETER or (slot.shape != parameter.shape and math.prod(slot.shape) != 1):
            actual = f"shape {slot.shape}; " + (
                "the checkpoint does not have the parameter" if parameter is _NO_PARAMETER else
                f"the parameter has {parameter.shape}"
            )
            raise MismatchError(
                f"the {type(rule).__name__} rule for a parameter cannot be applied to its optimizer state {name!r}",
                expected="a tensor of the parameter's shape, or a single number", found=actual, differences=(name,),
                next="leave the optimizer out of the state, or its parameters out of the rule",
            )
    if all(slot.shape == parameter.shape for slot, parameter in zip(slots, parameters, strict=True)):
        return _make(rule, match, slots)
    for name, slot in zip(match.sources, slots, strict=True):
        if (slot.dtype, slot.shape) != (slots[0].dtype, slots[0].shape) or not (
            followers is not None and followers.equal(slot, slots[0])
        ):
            raise MismatchError(
                f"the {type(rule).__name__} rule can keep only one of these optimizer state values, but they differ",
                differences=(name,), found=f"{name!r} and {match.sources[0]!r}",
                expected="equal values, as for parameters that are trained together",
                next="leave the optimizer out of the state, or its parameters out of the rule",
            )
    return [replace(slots[0]) for _ in match.targets]  # separate objects, so that the tensors are not tied


def _make(rule: Rename | LayoutRule, match: _Match, tensors: Sequence[SourceTensor]) -> Sequence[SourceTensor]:
    name, tensor = match.sources[0], tensors[0]
    if isinstance(rule, Rename):
        return tensors
    if isinstance(rule, Transpose):
        if len(tensor.shape) != len(rule.axes):
            raise _unlike(rule, name, f"{len(rule.axes)} dimensions", f"shape {tensor.shape}")
        return [transpose(tensor, rule.axes)]
    if isinstance(rule, Stack):
        _check_alike(rule, match, tensors, [source.shape for source in tensors])
        _check_dim(rule, name, tensor, of=len(tensor.shape) + 1)
        return [concatenate([add_dimension(source, rule.dim) for source in tensors], rule.dim)]
    _check_dim(rule, name, tensor)
    if isinstance(rule, Unstack):
        count = tensor.shape[rule.dim]
        return [drop_dimension(narrow(tensor, rule.dim, number, 1), rule.dim) for number in range(count)]
    if isinstance(rule, Split):
        return _split(rule, name, tensor)
    if isinstance(rule, Fuse):
        return [_fuse(rule, match, tensors)]
    before, after = (rule.size, rule.padded) if isinstance(rule, Pad) else (rule.padded, rule.size)
    if tensor.shape[rule.dim] != before:
        raise _unlike(rule, name, f"{before} in dimension {rule.dim}", f"shape {tensor.shape}")
    if after <= before:
        return [narrow(tensor, rule.dim, 0, after)]
    added = zeros(tensor, (*tensor.shape[: rule.dim], after - before, *tensor.shape[rule.dim + 1 :]))
    return [concatenate([tensor, added], rule.dim)]


def _split(rule: Split, name: str, tensor: SourceTensor) -> Sequence[SourceTensor]:
    lengths = _lengths(rule, name, tensor.shape[rule.dim])
    period, begin, results = sum(lengths), 0, []
    for length in lengths:
        cuts = [narrow(tensor, rule.dim, group * period + begin, length) for group in range(rule.groups)]
        results.append(concatenate(cuts, rule.dim))
        begin += length
    return results


def _fuse(rule: Fuse, match: _Match, tensors: Sequence[SourceTensor]) -> SourceTensor:
    sides = [tensor.shape[rule.dim] if len(tensor.shape) > rule.dim else 0 for tensor in tensors]
    shapes = [(*tensor.shape[: rule.dim], *tensor.shape[rule.dim + 1 :]) for tensor in tensors]
    _check_alike(rule, match, tensors, shapes)
    lengths = _lengths(rule, match.targets[0], sum(sides))
    if sides != [length * rule.groups for length in lengths]:
        expected = [length * rule.groups for length in lengths]
        raise _unlike(rule, " + ".join(match.sources), f"{expected} in dimension {rule.dim}", f"{sides}")
    return concatenate([
        narrow(tensor, rule.dim, group * length, length)
        for group in range(rule.groups) for tensor, length in zip(tensors, lengths, strict=True)
    ], rule.dim)


def _lengths(rule: Split | Fuse, name: str, side: int) -> list[int]:
    """How many elements of a group each part has, along a dimension of `side` elements."""
    unit, rest = divmod(side, sum(rule.parts))
    if rest or any(part * unit % rule.groups for part in rule.parts):
        parts = f"{':'.join(map(str, rule.parts))} in {rule.groups} groups"
        raise _unlike(rule, name, f"a dimension {rule.dim} that can be divided into {parts}", f"{side} elements")
    return [part * unit // rule.groups for part in rule.parts]


def _check_dim(rule: LayoutRule, name: str, tensor: SourceTensor, of: int | None = None) -> None:
    dim = 0 if isinstance(rule, Transpose) else rule.dim
    if dim >= (len(tensor.shape) if of is None else of):
        raise _unlike(rule, name, f"a dimension {dim}", f"shape {tensor.shape}")


def _check_alike(
    rule: LayoutRule, match: _Match, tensors: Sequence[SourceTensor], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raise MismatchError unless all tensors of the match have the same dtype, and the same shape except in the
    dimension along which they are joined.
    """
    for name, tensor, shape in zip(match.sources, tensors, shapes, strict=True):
        if (tensor.dtype, shape, len(tensor.shape)) != (tensors[0].dtype, shapes[0], len(tensors[0].shape)):
            expected = f"like {match.sources[0]}: {tensors[0].dtype.name} {tensors[0].shape}"
            raise _unlike(rule, name, expected, f"{tensor.dtype.name} {tensor.shape}")


def _unlike(rule: LayoutRule, name: str, expected: str, actual: str) -> MismatchError:
    return MismatchError(
        f"the {type(rule).__name__} rule cannot be applied to {name!r}",
        expected=expected, found=actual, differences=(name,),
        next="correct the dimension, the parts or the groups in the rule",
    )
