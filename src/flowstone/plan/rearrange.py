"""Rules applied to the tensors of a source: names to tensors before, names to tensors after; no byte moves.

Each rule works on what the one before has left. What it cannot be applied to is an error that names it: a rule that
names nothing, two tensors of one name, shapes that it does not speak of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from flowstone.config import NAMES_TOLD, UNSTACKED_MAX
from flowstone.errors import CollisionError, MismatchError, NoTensorError
from flowstone.layout_rules import (
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
    around,
)
from flowstone.name_patterns import bind, fill
from flowstone.plan.views import add_dimension, concatenate, drop_dimension, narrow, transpose, zeros
from flowstone.rules import STATE, Rename, Skip
from flowstone.table.dtype import DTYPES
from flowstone.table.stored import SourceTensor

Tensors: TypeAlias = Mapping[str, SourceTensor]


class Followers(msgspec.Struct, frozen=True):
    """Optimizer state that follows its parameters: the slots of each are rearranged as it is.

    sections  whether this is the case for the optimizer of this name
    equal     whether two stored tensors are known to have the same bytes
    """

    sections: Callable[[str], bool]
    equal: Callable[[SourceTensor, SourceTensor], bool]


def _is_never(_: str) -> bool:
    return False


class Origin(msgspec.Struct, frozen=True):
    """Where tensors come from: a checkpoint, and what its names begin with that those of the target do not.

    followers  None: rules speak of tensors that they name, and of no others
    is_spare   whether a complete set may leave out a tensor of this name
    is_lenient whether a Rename by itself may name no tensor: it may name something else
    """

    location: str
    prefix: str = ""
    followers: Followers | None = None
    is_spare: Callable[[str], bool] = _is_never
    is_lenient: bool = False


class _Match(msgspec.Struct, frozen=True):
    """Tensors that a rule takes together, by their names, and the names of what becomes of them.

    parameters  of slots that follow them
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    parameters: tuple[SourceTensor, ...] | None = None


def rearranged(tensors: Tensors, rules: Sequence[ConversionRule | RuleSet], origin: Origin) -> Tensors:
    """The tensors by their names after the rules; each stands where the first of those stood that it is made of.

    raises  NoTensorError   a rule names nothing
            CollisionError  two tensors get one name
            MismatchError   a tensor is not as a rule says, or a complete set has no rule for it
    """
    for rule in rules:
        if isinstance(rule, RuleSet):
            tensors = _by_set(tensors, rule, origin)
        elif not isinstance(rule, Skip):
            required = not (isinstance(rule, Rename) and origin.is_lenient)
            tensors, _ = _by_rule(tensors, rule, origin, required=required)
    return tensors


def _by_set(tensors: Tensors, rules: RuleSet, origin: Origin) -> Tensors:
    named: set[str] = set()
    for rule in rules.rules:
        if not isinstance(rule, Skip):
            required = rule.source not in rules.optional if isinstance(rule, Rename) else rule.required
            tensors, made = _by_rule(tensors, rule, origin, required=required)
            named |= made
    left = [name for name in tensors if name not in named and not origin.is_spare(name)]
    if rules.complete and left:
        raise MismatchError(
            f"{rules.name} has no rule for {len(left)} tensors of {origin.location}", differences=tuple(left),
            found=", ".join(left[:NAMES_TOLD]) + ", ..." * (len(left) > NAMES_TOLD),
            next="leave them out with --skip PATTERN (fs.Skip), or write rules for them",
        )
    return tensors


def _by_rule(
    tensors: Tensors, rule: Rename | LayoutRule, origin: Origin, *, required: bool
) -> tuple[Tensors, set[str]]:
    """The tensors after one rule, and the names that it has made."""
    matches = list(_matches(rule, tensors))
    if not matches and required and (isinstance(rule, Rename) or rule.required):
        raise NoTensorError(
            f"{rule} names no tensor of {origin.location}", found=", ".join(list(tensors)[:NAMES_TOLD]) + ", ...",
            next="correct the rule, or say required=false where it may name nothing",
        )
    if origin.followers is not None and not isinstance(rule, Rename):
        matches += _followers(rule, tensors, origin.followers)
    by_source = {name: match for match in matches for name in match.sources}
    entered = _Entered(origin.prefix)
    made: dict[tuple[int, ...], Sequence[SourceTensor]] = {}
    for name, tensor in tensors.items():
        match = by_source.get(name)
        if match is None:
            entered.add(name, tensor, name)
        elif match.sources[0] == name:
            sources = [tensors[one] for one in match.sources]
            key = tuple(map(id, sources))  # what was tied stays so
            if key not in made:
                made[key] = (
                    _made(rule, match, sources) if match.parameters is None or isinstance(rule, Rename) else
                    _followed(rule, match, sources, match.parameters, origin.followers)
                )
            for target, result in zip(match.targets, made[key], strict=True):
                entered.add(target, result, name)
    return entered.tensors, {target for match in matches for target in match.targets}


class _Entered:
    """Tensors by their new names, each taken once."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._sources: dict[str, str] = {}
        self.tensors: dict[str, SourceTensor] = {}

    def add(self, name: str, tensor: SourceTensor, source: str) -> None:
        if name in self.tensors:
            raise CollisionError(
                f"two tensors of the target would be called {name.removeprefix(self._prefix)!r}",
                found=f"{self._sources[name]!r} and {source!r}", next="rename or skip one of them",
            )
        self.tensors[name], self._sources[name] = tensor, source


def _matches(rule: Rename | LayoutRule, names: Tensors) -> Iterator[_Match]:
    """What a rule takes together."""
    if isinstance(rule, Rename):
        for name in names:
            moved = rule.moved(name)
            if moved is not None:
                yield _Match((name,), (moved,))
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
                f"{fill(rule.target, dict(key))!r} cannot be fused", missing=", ".join(missing),
                found=", ".join(parts.values()), next="correct the rule, or skip what is there",
            )
        yield _Match(tuple(parts[source] for source in rule.sources), (fill(rule.target, dict(key)),))


def _stacked(rule: Stack, names: Tensors) -> Iterator[_Match]:
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        if (bindings := bind(rule.source, name)) is not None:
            groups.setdefault(fill(rule.target, bindings), {})[bindings[rule.number]] = name
    for target, members in groups.items():
        wanted = [str(number) for number in range(len(members))]
        if set(wanted) != set(members):
            missing = next(number for number in wanted if number not in members)
            raise MismatchError(
                f"{target!r} cannot be stacked: number {missing} is missing", found=", ".join(sorted(members))[:200],
                next="all numbers from 0 on have to be there",
            )
        yield _Match(tuple(members[number] for number in wanted), (target,))


def _followers(rule: LayoutRule, tensors: Tensors, followers: Followers) -> Iterator[_Match]:
    """What a rule takes together of the slots of the parameters that it names."""
    slots: dict[tuple[str, str], dict[str, SourceTensor]] = {}
    for name in tensors:
        outer, is_slot, inner = name.partition(STATE)
        if is_slot and followers.sections(outer):
            path, _, slot = inner.rpartition(".")
            slots.setdefault((outer, slot), {})[name] = tensors.get(path, _NOWHERE)
    for (outer, slot), parameters in slots.items():
        for match in _matches(around(rule, f"{outer}{STATE}", f".{slot}"), parameters):
            yield _Match(match.sources, match.targets, tuple(parameters[name] for name in match.sources))


_NOWHERE = SourceTensor("", DTYPES["uint8"], (), ())
"""In the place of a parameter that the checkpoint does not have."""


def _followed(
    rule: LayoutRule, match: _Match, slots: Sequence[SourceTensor], parameters: Sequence[SourceTensor],
    followers: Followers | None,
) -> Sequence[SourceTensor]:
    """What becomes of slots: of one as large as its parameter, what becomes of that; of a single number, itself."""
    for name, slot, parameter in zip(match.sources, slots, parameters, strict=True):
        if parameter is _NOWHERE or (slot.shape != parameter.shape and math.prod(slot.shape) != 1):
            found = f"shape {slot.shape}; " + (
                "the checkpoint does not have the parameter" if parameter is _NOWHERE else
                f"the parameter has {parameter.shape}"
            )
            raise MismatchError(
                f"{type(rule).__name__} cannot be applied to {name!r}, which belongs to a parameter that it names",
                expected="a slot of the parameter's shape, or a single number", found=found, differences=(name,),
                next="leave the optimizer out of the state, or its parameters out of the rule",
            )
    if all(slot.shape == parameter.shape for slot, parameter in zip(slots, parameters, strict=True)):
        return _made(rule, match, slots)
    for name, slot in zip(match.sources, slots, strict=True):
        if (slot.dtype, slot.shape) != (slots[0].dtype, slots[0].shape) or not (
            followers is not None and followers.equal(slot, slots[0])
        ):
            raise MismatchError(
                f"{type(rule).__name__} makes one number of several that differ", differences=(name,),
                found=f"{name!r} and {match.sources[0]!r}", expected="one value, as of parameters that train together",
                next="leave the optimizer out of the state, or its parameters out of the rule",
            )
    return [replace(slots[0]) for _ in match.targets]  # each by itself: they are not tied


def _made(rule: Rename | LayoutRule, match: _Match, tensors: Sequence[SourceTensor]) -> Sequence[SourceTensor]:
    name, tensor = match.sources[0], tensors[0]
    if isinstance(rule, Rename):
        return tensors
    if isinstance(rule, Transpose):
        if len(tensor.shape) != len(rule.axes):
            raise _unlike(rule, name, f"{len(rule.axes)} dimensions", f"shape {tensor.shape}")
        return [transpose(tensor, rule.axes)]
    if isinstance(rule, Stack):
        _check_alike(rule, match, tensors, [one.shape for one in tensors])
        _check_dim(rule, name, tensor, of=len(tensor.shape) + 1)
        return [concatenate([add_dimension(one, rule.dim) for one in tensors], rule.dim)]
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
    period, begin, found = sum(lengths), 0, []
    for length in lengths:
        cuts = [narrow(tensor, rule.dim, group * period + begin, length) for group in range(rule.groups)]
        found.append(concatenate(cuts, rule.dim))
        begin += length
    return found


def _fuse(rule: Fuse, match: _Match, tensors: Sequence[SourceTensor]) -> SourceTensor:
    sides = [tensor.shape[rule.dim] if len(tensor.shape) > rule.dim else 0 for tensor in tensors]
    shapes = [(*one.shape[: rule.dim], *one.shape[rule.dim + 1 :]) for one in tensors]
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
    """How long each part is within a group."""
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
    """All have one type, and one shape but for what the rule joins."""
    for name, tensor, shape in zip(match.sources, tensors, shapes, strict=True):
        if (tensor.dtype, shape, len(tensor.shape)) != (tensors[0].dtype, shapes[0], len(tensors[0].shape)):
            expected = f"as {match.sources[0]}: {tensors[0].dtype.name} {tensors[0].shape}"
            raise _unlike(rule, name, expected, f"{tensor.dtype.name} {tensor.shape}")


def _unlike(rule: LayoutRule, name: str, expected: str, found: str) -> MismatchError:
    return MismatchError(
        f"{type(rule).__name__} cannot be applied to {name!r}", expected=expected, found=found, differences=(name,),
        next="correct the rule: its dimension, its parts, its groups",
    )
