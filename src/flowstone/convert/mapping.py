"""Which tensors of a source become which of a target: sections, rules, dtypes; what has no place there is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from flowstone.config import NAMES_TOLD
from flowstone.convert.cast import CASTABLE
from flowstone.convert.layout import Output
from flowstone.convert.source import Source, SourceTensor
from flowstone.errors import ArgumentError, CollisionError, MismatchError, NoTensorError, UnsupportedFormatError
from flowstone.format.objects import TensorRef
from flowstone.plan.match import rename
from flowstone.rules import Rename, Rule, Skip
from flowstone.table.dtype import DType
from flowstone.table.pieces import Alias

DOCUMENTS_SECTION = "huggingface"
"""Where a checkpoint of ours keeps the documents of a model that was imported."""


class Mapped(msgspec.Struct, frozen=True):
    """What a target is made of. `skipped`: names that a rule leaves out."""

    outputs: tuple[Output, ...]
    aliases: tuple[Alias, ...]
    skipped: tuple[str, ...]
    cast: tuple[str, ...]


def check_rules(rules: object) -> tuple[Rule, ...]:
    """The rules as a tuple. Conversion knows Rename and Skip. Raises ArgumentError."""
    found = (rules,) if isinstance(rules, Rename | Skip) else tuple(rules) if isinstance(rules, Sequence) else (rules,)
    for rule in found:
        if not isinstance(rule, Rename | Skip):
            raise ArgumentError(
                f"{rule!r:.80} is no rule of a conversion", expected="fs.Rename or fs.Skip", next="leave it out"
            )
    return found


def choose(source: Source, section: str | None, rules: Sequence[Rule], dtype: DType | None) -> Mapped:
    """The tensors of a section by their names in it, or all; renamed, but for those that a rule skips.

    Rules speak of names as the source has them. A name that only an alias has in the section is a tensor of the target.

    raises  NoTensorError   no tensor is in that section
            CollisionError  rules give two tensors one name
    """
    tensors = {tensor.name: tensor for tensor in source.tensors}
    prefix = "" if section is None else f"{section}."
    names: list[tuple[str, SourceTensor]] = []
    skipped: list[str] = []
    for name, tensor in _all_names(source, tensors):
        if not name.startswith(prefix):
            continue
        if any(isinstance(rule, Skip) and rule.allows(name) for rule in rules):
            skipped.append(name)
        else:
            new = rename(name, rules)
            names.append((new.removeprefix(prefix), tensor))
    skipped += _unmapped(source, prefix, rules)
    if not names and not skipped:
        sections = ", ".join(dict.fromkeys(name.partition(".")[0] for name in tensors)) or "none"
        raise NoTensorError(
            f"no tensor of {source.location} is in the section {section!r}" if section is not None
            else f"{source.location} has no tensor",
            found=f"sections {sections}", next="name one of them with --section",
        )
    return _mapped(names, tuple(skipped), dtype)


def _unmapped(source: Source, prefix: str, rules: Sequence[Rule]) -> list[str]:
    """The values of a section that no checkpoint of ours can hold. Raises UnsupportedFormatError for those not skipped.
    """
    found = [one for one in source.unmapped if one.name.startswith(prefix)]
    left = [one for one in found if not any(isinstance(rule, Skip) and rule.allows(one.name) for rule in rules)]
    if left:
        raise UnsupportedFormatError(
            f"{source.location} holds {len(left)} values of types that are not known, and nothing of them was executed",
            found=", ".join(f"{one.name} ({one.what})" for one in left[:NAMES_TOLD]),
            next="leave them out with --skip PATTERN (fs.Skip), or save the file again without them",
        )
    return [one.name for one in found]


def _all_names(source: Source, tensors: Mapping[str, SourceTensor]) -> Iterator[tuple[str, SourceTensor]]:
    yield from tensors.items()
    for alias in source.aliases:
        yield alias.name, tensors[alias.target]


def _mapped(names: Sequence[tuple[str, SourceTensor]], skipped: tuple[str, ...], dtype: DType | None) -> Mapped:
    outputs: dict[str, Output] = {}
    aliases: list[Alias] = []
    first: dict[str, str] = {}
    taken: set[str] = set()
    for name, tensor in names:
        if name in taken:
            raise CollisionError(
                f"two tensors of the target would be called {name!r}", next="rename or skip one of them"
            )
        taken.add(name)
        if tensor.name in first:
            aliases.append(Alias(name, first[tensor.name]))
            continue
        first[tensor.name] = name
        is_cast = dtype is not None and tensor.dtype.name in CASTABLE
        outputs[name] = Output(name, tensor, dtype if is_cast and dtype is not None else tensor.dtype)
    cast = tuple(one.name for one in outputs.values() if one.dtype is not one.tensor.dtype)
    return Mapped(tuple(outputs.values()), tuple(aliases), skipped, cast)


def check_objects(source: Source, section: str | None, rules: Sequence[Rule], kind: str) -> tuple[str, ...]:
    """The names of values that are no tensors, and that rules leave out: a target of this kind has no place for them.

    raises  MismatchError naming those that no rule does
    """
    objects = source.objects if section is None else {k: v for k, v in source.objects.items() if k == section}
    lost = [name for key, value in objects.items() if key != DOCUMENTS_SECTION for name, _ in leaves(key, value)]
    lost += [key for key in source.per_rank if section in (None, key)]
    left = [name for name in lost if not any(isinstance(rule, Skip) and rule.allows(name) for rule in rules)]
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


def documents_of(source: Source, given: Path | None) -> Mapping[str, bytes]:
    """The documents that go beside a model: of the directory that is given, else those that were imported with it."""
    from flowstone.convert.sources.safetensors import read_documents

    if given is not None:
        found = read_documents(given)
        if not found:
            raise ArgumentError(f"{given} has no documents of a model", next="give the directory with its config.json")
        return found
    kept = source.objects.get(DOCUMENTS_SECTION)
    if not isinstance(kept, Mapping):
        return source.documents
    return {
        name: content for name, content in kept.items()
        if isinstance(name, str) and isinstance(content, bytes) and "/" not in name and not name.startswith(".")
    }
