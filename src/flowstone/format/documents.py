"""A model's documents, which lie beside its tensors: configuration and tokenizer, as Hugging Face calls them.

In a checkpoint they are the values of one section: each file's name, and its bytes. Names become names of files again
at an export, so nothing else is a document.
"""

from __future__ import annotations

from flowstone.config import MIB

DOCUMENTS_SECTION = "huggingface"
"""Where a checkpoint keeps the documents of a model that was imported, or trained by a framework that has them."""

DOCUMENTS_BYTES_MAX = 64 * MIB
"""Of all of them. The longest tokenizers known take half of it."""

SHARD_INDEX_SUFFIX = ".safetensors.index.json"

_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_NAME_BYTES_MAX = 255  # of file systems


def is_document(name: object) -> bool:
    """Whether a file of that name can be one: never weights nor their index, and nothing outside of its directory."""
    return (
        isinstance(name, str) and name.endswith(_SUFFIXES) and not name.endswith(SHARD_INDEX_SUFFIX)
        and name.isprintable() and not name.startswith(".") and not {"/", "\\"} & set(name)
        and len(name.encode()) <= _NAME_BYTES_MAX
    )
