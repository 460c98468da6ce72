"""Which tensors of a source become which of a target: sections, rules, dtypes; what has no place there is named."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from flowstone.config import NAMES_TOLD
from flowstone.convert.cast import CASTABLE
from flowstone.convert.followers import Follow
from flowstone.convert.layout import Output
from flowstone.convert.source import Source, Unmapped
from flowstone.errors import ArgumentError, CollisionError, MismatchError, NoTensorError, UnsupportedFormatError
from flowstone.format.objects import TensorRef
from flowstone.layout_rules import KINDS, ConversionRule, RuleSet
from flowstone.plan.rearrange import Origin, rearranged
from flowstone.rules import Skip
from flowstone.table.dtype import DType
from flowstone.table.pieces import Alias
from flowstone.table.stored import SourceTensor


class Mapped(msgspec.Struct, frozen=True):
    """What a target is made of. `skipped`: names that a rule leaves out."""

    outputs: tuple[Output, ...]
    aliases: tuple[Alias, ...]
    skipped: tuple[str, ...]
    cast: tuple[str, ...]


class Rules(msgspec.Struct, frozen=True):
    """What a caller's rules say of a source.

    skips  which names are left out, as the source has them
    steps  what is done to the others, one after the other
    """

    skips: tuple[Skip, ...]
    steps: tuple[ConversionRule | RuleSet, ...]

    def skip(self, name: str) -> bool:
        """Whether a rule leaves out that name."""
        return any(rule.allows(name) for rule in self.skips)


def check_rules(rules: object, source: Source, section: str | None) -> Rules:
    """The rules of a conversion. Those of a set speak of names below the section, if there are some.

    raises  ArgumentError
    """
    prefix = "" if section is None or source.is_flat else f"{section}."
    if not any(name.startswith(prefix) for name in all_names(source)):
        prefix = ""
    is_one = not isinstance(rules, Sequence) or isinstance(rules, str)
    skips: list[Skip] = []
    steps: list[ConversionRule | RuleSet] = []
    for rule in (rules,) if is_one else tuple(rules):  # type: ignore[arg-type]
        if isinstance(rule, RuleSet):
            found = rule.below(prefix)
            skips += [one for one in found.rules if isinstance(one, Skip)]
            steps.append(found)
        elif isinstance(rule, Skip):
            skips.append(rule)
        elif isinstance(rule, KINDS):
            steps.append(rule)
        else:
            raise ArgumentError(
                f"{rule!r:.80} is no rule of a conversion", expected="fs.Rename, fs.Skip, fs.Split, ..., fs.RuleSet",
                next="leave it out",
            )
    return Rules(tuple(skips), tuple(steps))


def choose(source: Source, section: str | None, rules: Rules, dtype: DType | None, follow: Follow) -> Mapped:
    """The tensors of a section by their names in it, or all; as the rules have them, but for those that one skips.

    A name that only an alias has in the section is a tensor of the target. Optimizer state follows its parameters.

    raises  NoTensorError   no tensor is in that section, or a rule names none
            CollisionError  rules give two tensors one name
            MismatchError   a tensor is not as a rule says
    """
    prefix = "" if section is None else f"{section}."
    tensors: dict[str, SourceTensor] = {}
    skipped: list[str] = []
    for name, tensor in all_names(source).items():
        if not name.startswith(prefix):
            continue
        if rules.skip(name):
            skipped.append(name)
        else:
            tensors[name] = tensor
    unmapped = [one for one in source.unmapped if one.name.startswith(prefix)]
    check_mapped(source, [one for one in unmapped if not rules.skip(one.name)])
    skipped += [one.name for one in unmapped]
    if not tensors and not skipped:
        sections = ", ".join(dict.fromkeys(tensor.name.partition(".")[0] for tensor in source.tensors)) or "none"
        raise NoTensorError(
            f"no tensor of {source.location} is in the section {section!r}" if section is not None
            else f"{source.location} has no tensor",
            found=f"sections {sections}", next="name one of them with --section",
        )
    found = rearranged(tensors, rules.steps, Origin(source.location, prefix, follow.slots))
    return _mapped([(name.removeprefix(prefix), tensor) for name, tensor in found.items()], tuple(skipped), dtype)


def check_mapped(source: Source, left: Sequence[Unmapped]) -> None:
    """Raise UnsupportedFormatError if there are any: values that are wanted, which no checkpoint of ours can hold."""
    if left:
        raise UnsupportedFormatError(
            f"{source.location} holds {len(left)} values without a place in a checkpoint; nothing of them was executed",
            found=", ".join(f"{one.name} ({one.what})" for one in left[:NAMES_TOLD]),
            next="leave them out with --skip PATTERN (fs.Skip), or save again without them",
        )


def all_names(source: Source) -> dict[str, SourceTensor]:
    """The tensors by every name that they have."""
    tensors = {tensor.name: tensor for tensor in source.tensors}
    return tensors | {alias.name: tensors[alias.target] for alias in source.aliases}


def _mapped(names: Sequence[tuple[str, SourceTensor]], skipped: tuple[str, ...], dtype: DType | None) -> Mapped:
    outputs: dict[str, Output] = {}
    aliases: list[Alias] = []
    first: dict[int, str] = {}
    taken: set[str] = set()
    for name, tensor in names:
        if name in taken:
            raise CollisionError(
                f"two tensors of the target would be called {name!r}", next="rename or skip one of them"
            )
        taken.add(name)
        if id(tensor) in first:
            aliases.append(Alias(name, first[id(tensor)]))
            continue
        first[id(tensor)] = name
        is_cast = dtype is not None and tensor.dtype.name in CASTABLE
        outputs[name] = Output(name, tensor, dtype if is_cast and dtype is not None else tensor.dtype)
    cast = tuple(one.name for one in outputs.values() if one.dtype is not one.tensor.dtype)
    return Mapped(tuple(outputs.values()), tuple(aliases), skipped, cast)


def check_objects(source: Source, section: str | None, rules: Rules, kind: str) -> tuple[str, ...]:
    """The names of values that are no tensors, and that rules leave out: a target of this kind has no place for them.

    raises  MismatchError naming those that no rule does
    """
    objects = source.objects if section is None else {k: v for k, v in source.objects.items() if k == section}
    lost = [name for key, value in objects.items() for name, _ in leaves(key, value)]
    lost += [key for key in source.per_rank if section in (None, key)]
    left = [name for name in lost if not rules.skip(name)]
    if left:
        raise MismatchError(
            f"a checkpoint of the kind {kind!r} has no place for {len(left)} values that are no tensors",
            differences=tuple(left), found=", ".join(left[:NAMES_TOLD]) + ", ..." * (len(left) > NAMES_TOLD),
            next="leave them out with --skip PATTERN (fs.Skip), or name one section",
        )
    return tuple(lost)


def leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """What is no tensor in a value, by dotted names."""
    if isinstance(value, TensorRef) and value.kind in ("tensor", "ndarray"):
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(f"{name}.{key}", inner)
    else:
        yield name, value


def without_lost(value: object, names: Collection[str]) -> object:
    """A section without the places of tensors that have other names now, or none: the others stand where they stood."""
    if not isinstance(value, dict):
        return value
    kept = {
        key: without_lost(inner, names) for key, inner in value.items()
        if not isinstance(inner, TensorRef) or inner.kind not in ("tensor", "ndarray") or inner.name in names
    }
    return value if len(kept) == len(value) and all(kept[key] is value[key] for key in kept) else type(value)(kept)
