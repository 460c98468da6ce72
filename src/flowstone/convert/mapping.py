"""Map a source's tensors to a target: select sections, apply rules, convert dtypes, and report values that cannot be
stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from flowstone.config import NAMES_LISTED_MAX
from flowstone.convert.cast import CASTABLE
from flowstone.convert.followers import OptimizerMapping
from flowstone.convert.layout import Output
from flowstone.convert.source import SourceCheckpoint, UnmappedValue
from flowstone.errors import ArgumentError, CollisionError, MismatchError, NoTensorError, UnsupportedFormatError
from flowstone.format.objects import TensorRef
from flowstone.layouts.layout_rules import ConversionRule, RuleSet
from flowstone.layouts.rearrange import Origin, rearrange
from flowstone.rules.load_rules import Skip
from flowstone.table.dtype import DType
from flowstone.table.pieces import Alias
from flowstone.table.stored import SourceTensor


class TensorMapping(msgspec.Struct, frozen=True):
    """The tensors of a target. `skipped`: names that a rule leaves out. `cast`: names of tensors whose dtype changes.
    """

    outputs: tuple[Output, ...]
    aliases: tuple[Alias, ...]
    skipped: tuple[str, ...]
    cast: tuple[str, ...]


class ConversionRules(msgspec.Struct, frozen=True):
    """The rules of a conversion.

    skips  rules that leave names of the source out
    steps  rules for the other names, applied in order
    """

    skips: tuple[Skip, ...]
    steps: tuple[ConversionRule | RuleSet, ...]

    def skip(self, name: str) -> bool:
        """Whether a rule leaves this name out."""
        return any(rule.allows(name) for rule in self.skips)


def check_rules(rules: object, source: SourceCheckpoint, section: str | None) -> ConversionRules:
    """Check the rules of a conversion, and return them. Rules in a RuleSet match names below the section, if the source
    has such names.

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
            nested = rule.below(prefix)
            skips += [inner for inner in nested.rules if isinstance(inner, Skip)]
            steps.append(nested)
        elif isinstance(rule, Skip):
            skips.append(rule)
        elif isinstance(rule, ConversionRule):
            steps.append(rule)
        else:
            raise ArgumentError(
                f"not a conversion rule: {rule!r:.80}", expected="fs.Rename, fs.Skip, fs.Split, ..., fs.RuleSet",
                next="leave it out of the rules",
            )
    return ConversionRules(tuple(skips), tuple(steps))


def select_tensors(
    source: SourceCheckpoint, section: str | None, rules: ConversionRules, dtype: DType | None, follow: OptimizerMapping
) -> TensorMapping:
    """Select all tensors, or those of a section, whose name is left out of their new names. Apply the rules to them.

    If an alias is in the section, but its tensor is not, the alias becomes a tensor. An optimizer's state is changed
    like its parameters.

    raises  NoTensorError   the section has no tensor, or a rule matches no tensor
            CollisionError  rules give two tensors one name
            MismatchError   a tensor does not fit a rule
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
    unmapped = [value for value in source.unmapped if value.name.startswith(prefix)]
    check_mapped(source, [value for value in unmapped if not rules.skip(value.name)])
    skipped += [value.name for value in unmapped]
    if not tensors and not skipped:
        sections = ", ".join(dict.fromkeys(tensor.name.partition(".")[0] for tensor in source.tensors)) or "none"
        raise NoTensorError(
            f"no tensor of {source.location} is in the section {section!r}" if section is not None
            else f"{source.location} has no tensor",
            found=f"sections {sections}", next="name one of these sections with --section",
        )
    arranged = rearrange(tensors, rules.steps, Origin(source.location, prefix, follow.slots))
    return _mapped([(name.removeprefix(prefix), tensor) for name, tensor in arranged.items()], tuple(skipped), dtype)


def check_mapped(source: SourceCheckpoint, left: Sequence[UnmappedValue]) -> None:
    """Raise UnsupportedFormatError if there are selected values that a Flowstone checkpoint cannot store."""
    if left:
        raise UnsupportedFormatError(
            f"{source.location} holds {len(left)} values that a checkpoint cannot store; no code in them was executed",
            found=", ".join(f"{value.name} ({value.type_name})" for value in left[:NAMES_LISTED_MAX]),
            next="leave them out with --skip PATTERN (fs.Skip), or save again without them",
        )


def all_names(source: SourceCheckpoint) -> dict[str, SourceTensor]:
    """The tensor for each name, aliases included."""
    tensors = {tensor.name: tensor for tensor in source.tensors}
    return tensors | {alias.name: tensors[alias.target] for alias in source.aliases}


def _mapped(names: Sequence[tuple[str, SourceTensor]], skipped: tuple[str, ...], dtype: DType | None) -> TensorMapping:
    outputs: dict[str, Output] = {}
    aliases: list[Alias] = []
    first: dict[int, str] = {}
    taken: set[str] = set()
    for name, tensor in names:
        if name in taken:
            raise CollisionError(
                f"two tensors of the target would have the name {name!r}", next="rename or skip one of the two tensors"
            )
        taken.add(name)
        if id(tensor) in first:
            aliases.append(Alias(name, first[id(tensor)]))
            continue
        first[id(tensor)] = name
        is_cast = dtype is not None and tensor.dtype.name in CASTABLE
        outputs[name] = Output(name, tensor, dtype if is_cast and dtype is not None else tensor.dtype)
    cast = tuple(output.name for output in outputs.values() if output.dtype is not output.tensor.dtype)
    return TensorMapping(tuple(outputs.values()), tuple(aliases), skipped, cast)


def check_objects(source: SourceCheckpoint, section: str | None, rules: ConversionRules, kind: str) -> tuple[str, ...]:
    """Check that rules leave out all values that are not tensors, since the target cannot hold these. Returns the names
    of the left out values.

    raises  MismatchError  there are values that no rule leaves out; the error names them
    """
    objects = source.objects if section is None else {k: v for k, v in source.objects.items() if k == section}
    lost = [name for key, value in objects.items() for name, _ in non_tensor_leaves(key, value)]
    lost += [key for key in source.per_rank if section in (None, key)]
    left = [name for name in lost if not rules.skip(name)]
    if left:
        raise MismatchError(
            f"a checkpoint of the format {kind!r} cannot hold {len(left)} values that are not tensors",
            differences=tuple(left),
            found=", ".join(left[:NAMES_LISTED_MAX]) + ", ..." * (len(left) > NAMES_LISTED_MAX),
            next="leave them out with --skip PATTERN (fs.Skip), or export one section with --section",
        )
    return tuple(lost)


def non_tensor_leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The values inside of `value` that are neither containers nor tensors, as (dotted name, value)."""
    if isinstance(value, TensorRef) and value.kind in ("tensor", "ndarray"):
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from non_tensor_leaves(f"{name}.{key}", inner)
    else:
        yield name, value


def without_missing_refs(value: object, names: Collection[str]) -> object:
    """A copy of a section's object without references to tensors whose names are not in `names`."""
    if not isinstance(value, dict):
        return value
    remaining = {
        key: without_missing_refs(inner, names) for key, inner in value.items()
        if not isinstance(inner, TensorRef) or inner.kind not in ("tensor", "ndarray") or inner.name in names
    }
    is_same = len(remaining) == len(value) and all(remaining[key] is value[key] for key in remaining)
    return value if is_same else type(value)(remaining)
