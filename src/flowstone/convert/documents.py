"""A model's documents (config.json, tokenizer). They are files beside its tensors, or a section of a Flowstone
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeAlias, cast

from msgspec.structs import replace

from flowstone.convert.source import SourceCheckpoint
from flowstone.errors import ArgumentError, UnsupportedFormatError
from flowstone.format.documents import DOCUMENTS_BYTES_MAX, DOCUMENTS_SECTION, is_document
from flowstone.format.objects import TensorRef
from flowstone.reading.checkpoint import Checkpoint
from flowstone.store.os_errors import translated
from flowstone.table.pieces import Alias
from flowstone.table.stored import SourceTensor

StoredDocument: TypeAlias = bytes | TensorRef
"""A document in a checkpoint: a long one is stored as a tensor."""


def read_documents(directory: Path) -> Mapping[str, bytes]:
    """Read the small files of a model that are beside its tensors: name -> content."""
    documents: dict[str, bytes] = {}
    left = DOCUMENTS_BYTES_MAX
    for name in sorted(os.listdir(directory)):
        path = directory / name
        if not is_document(name) or not path.is_file():
            continue
        with translated(directory, "read", name):
            left -= path.stat().st_size
            if left < 0:
                raise UnsupportedFormatError(
                    f"the model's documents (configuration, tokenizer and the like) in {directory} are too large",
                    expected=f"at most {DOCUMENTS_BYTES_MAX} bytes in all",
                    next="move the largest of these files elsewhere",
                )
            documents[name] = path.read_bytes()
    return documents


def stored_documents(checkpoint: Checkpoint) -> Mapping[str, StoredDocument]:
    """The documents in a checkpoint's section for documents: those that all ranks share, or that only rank 0
    has. {} if that section contains anything else, or is too long.
    """
    section = checkpoint.contents.replicated.get(DOCUMENTS_SECTION)
    if section is None:
        first, *others = checkpoint.contents.per_rank.get(DOCUMENTS_SECTION) or [None]
        section = first if all(other is None for other in others) else None
    if not isinstance(section, dict):
        return {}
    lengths = [_length(checkpoint, name, value) for name, value in section.items()]
    are_documents = None not in lengths and sum(cast("list[int]", lengths)) <= DOCUMENTS_BYTES_MAX
    return cast("Mapping[str, StoredDocument]", section) if are_documents else {}


def _length(checkpoint: Checkpoint, name: object, value: object) -> int | None:
    """The length of a document in bytes; None if the value is not a document."""
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


def read_stored_document(checkpoint: Checkpoint, document: StoredDocument) -> bytes:
    """The bytes of a document, verified. Raises DamagedError, StorageError."""
    if isinstance(document, bytes):
        return document
    return checkpoint.read(document.name, framework="numpy").tobytes()


def with_documents(source: SourceCheckpoint, checkpoint: Checkpoint) -> SourceCheckpoint:
    """Move a checkpoint's documents from its objects and tensors to `SourceCheckpoint.documents`."""
    documents = stored_documents(checkpoint)
    if not documents:
        return source
    tensors, aliases = source.tensors, source.aliases
    long = {value.name for value in documents.values() if isinstance(value, TensorRef)}
    if long:
        tensors, aliases = _without(long, tensors, aliases)
    return replace(
        source, tensors=tensors, aliases=aliases,
        objects={name: value for name, value in source.objects.items() if name != DOCUMENTS_SECTION},
        per_rank={name: value for name, value in source.per_rank.items() if name != DOCUMENTS_SECTION},
        documents={name: read_stored_document(checkpoint, value) for name, value in documents.items()},
    )


def _without(
    names: Collection[str], tensors: tuple[SourceTensor, ...], aliases: tuple[Alias, ...]
) -> tuple[tuple[SourceTensor, ...], tuple[Alias, ...]]:
    """Remove these names of tensors. A tensor that has another name stays under that name."""
    aliases = tuple(alias for alias in aliases if alias.name not in names)
    others = {alias.target: alias.name for alias in reversed(aliases) if alias.target in names}
    remaining = (
        replace(tensor, name=others[tensor.name]) if tensor.name in others else tensor
        for tensor in tensors if tensor.name not in names or tensor.name in others
    )
    left = (Alias(alias.name, others.get(alias.target, alias.target)) for alias in aliases)
    return tuple(remaining), tuple(alias for alias in left if alias.name != alias.target)


def documents_of(source: SourceCheckpoint, given: Path | None) -> Mapping[str, bytes]:
    """The documents to write beside a model: those in the directory `given`, or, if that is None, those in the
    checkpoint.
    """
    if given is None:
        return source.documents
    documents = read_documents(given)
    if not documents:
        raise ArgumentError(
            f"{given} has neither a config.json nor other documents of a model",
            next="give the directory with the model's config.json",
        )
    return documents
