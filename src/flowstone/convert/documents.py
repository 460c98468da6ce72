"""A model's documents: those beside tensors in a directory, and those that a checkpoint of ours keeps."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeAlias, cast

from msgspec.structs import replace

from flowstone.checkpoint import Checkpoint
from flowstone.convert.source import Source
from flowstone.errors import ArgumentError, UnsupportedFormatError
from flowstone.format.documents import DOCUMENTS_BYTES_MAX, DOCUMENTS_SECTION, is_document
from flowstone.format.objects import TensorRef
from flowstone.store.os_errors import translated
from flowstone.table.pieces import Alias
from flowstone.table.stored import SourceTensor

Kept: TypeAlias = bytes | TensorRef
"""A document in a checkpoint: a long one lies among the tensors."""


def read_documents(directory: Path) -> Mapping[str, bytes]:
    """Small files beside the tensors, which belong to the model."""
    found: dict[str, bytes] = {}
    left = DOCUMENTS_BYTES_MAX
    for name in sorted(os.listdir(directory)):
        path = directory / name
        if not is_document(name) or not path.is_file():
            continue
        with translated(directory, "read", name):
            left -= path.stat().st_size
            if left < 0:
                raise UnsupportedFormatError(
                    f"the documents beside the tensors of {directory} are too long",
                    expected=f"at most {DOCUMENTS_BYTES_MAX} bytes in all", next="move the longest of them elsewhere",
                )
            found[name] = path.read_bytes()
    return found


def kept_documents(checkpoint: Checkpoint) -> Mapping[str, Kept]:
    """The documents that a checkpoint keeps, for all ranks or on rank 0; none where that section is something else."""
    found = checkpoint.contents.replicated.get(DOCUMENTS_SECTION)
    if found is None:
        first, *others = checkpoint.contents.per_rank.get(DOCUMENTS_SECTION) or [None]
        found = first if all(other is None for other in others) else None
    if not isinstance(found, dict):
        return {}
    lengths = [_length(checkpoint, name, value) for name, value in found.items()]
    are_documents = None not in lengths and sum(cast("list[int]", lengths)) <= DOCUMENTS_BYTES_MAX
    return cast("Mapping[str, Kept]", found) if are_documents else {}


def _length(checkpoint: Checkpoint, name: object, value: object) -> int | None:
    """Of one of them; None for what is no document."""
    if not is_document(name):
        return None
    if isinstance(value, bytes):
        return len(value)
    if not isinstance(value, TensorRef) or value.kind != "bytes" or value.name not in checkpoint.tensors:
        return None
    entry = checkpoint.tensors[value.name]
    if not value.name.startswith((f"{DOCUMENTS_SECTION}.", f"{DOCUMENTS_SECTION}@")):
        return None
    return entry.shape[0] if entry.dtype == "uint8" and len(entry.shape) == 1 else None


def read_kept(checkpoint: Checkpoint, document: Kept) -> bytes:
    """Its bytes, verified. Raises DamagedError, StorageError."""
    if isinstance(document, bytes):
        return document
    return checkpoint.read(document.name, framework="numpy").tobytes()


def with_documents(source: Source, checkpoint: Checkpoint) -> Source:
    """What a checkpoint of ours holds, with its documents as such, no more among its objects and tensors."""
    kept = kept_documents(checkpoint)
    if not kept:
        return source
    tensors, aliases = source.tensors, source.aliases
    long = {value.name for value in kept.values() if isinstance(value, TensorRef)}
    if long:
        tensors, aliases = _without(long, tensors, aliases)
    return replace(
        source, tensors=tensors, aliases=aliases,
        objects={name: value for name, value in source.objects.items() if name != DOCUMENTS_SECTION},
        per_rank={name: value for name, value in source.per_rank.items() if name != DOCUMENTS_SECTION},
        documents={name: read_kept(checkpoint, value) for name, value in kept.items()},
    )


def _without(
    names: Collection[str], tensors: tuple[SourceTensor, ...], aliases: tuple[Alias, ...]
) -> tuple[tuple[SourceTensor, ...], tuple[Alias, ...]]:
    """The same without those names. A tensor that has another name, too, is called by that."""
    aliases = tuple(one for one in aliases if one.name not in names)
    others = {one.target: one.name for one in reversed(aliases) if one.target in names}
    kept = (
        replace(one, name=others[one.name]) if one.name in others else one
        for one in tensors if one.name not in names or one.name in others
    )
    left = (Alias(one.name, others.get(one.target, one.target)) for one in aliases)
    return tuple(kept), tuple(one for one in left if one.name != one.target)


def documents_of(source: Source, given: Path | None) -> Mapping[str, bytes]:
    """The documents that go beside a model: of the directory that is given, else those that the checkpoint has."""
    if given is None:
        return source.documents
    found = read_documents(given)
    if not found:
        raise ArgumentError(f"{given} has no documents of a model", next="give the directory with its config.json")
    return found
