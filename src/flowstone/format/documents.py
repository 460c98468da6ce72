"""A model's documents, stored beside its tensors: its configuration and tokenizer, in Hugging Face's files.

In a checkpoint they form one section, which maps each file's name to its bytes. An export creates files with these
names, so only safe file names are accepted.
"""

from __future__ import annotations

from flowstone.config import MIB

DOCUMENTS_SECTION = "huggingface"
"""The section with the documents of a model that was imported, or trained by a framework that provides them."""

DOCUMENTS_BYTES_MAX = 64 * MIB
"""The limit for all documents together. The largest known tokenizers take half of it."""

SHARD_INDEX_SUFFIX = ".safetensors.index.json"

_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_NAME_BYTES_MAX = 255  # the limit of file systems


def is_document(name: object) -> bool:
    """Whether a file with this name can be one of a model's documents. False for weights, for their index, and for a
    path in another directory.
    """
    return (
        isinstance(name, str) and name.endswith(_SUFFIXES) and not name.endswith(SHARD_INDEX_SUFFIX)
        and name.isprintable() and not name.startswith(".") and not {"/", "\\"} & set(name)
        and len(name.encode()) <= _NAME_BYTES_MAX
    )
