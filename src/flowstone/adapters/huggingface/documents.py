"""The documents: files that `from_pretrained` needs beside a model's weights, which are its configurations and its
tokenizer.
"""

from __future__ import annotations

import copy
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from flowstone.adapters.huggingface.peft_adapters import is_peft, unwrapped
from flowstone.format.documents import DOCUMENTS_BYTES_MAX, DOCUMENTS_SECTION, is_document
from flowstone.log import log
from flowstone.state import PerRank


class ModelDocuments:
    """The documents of a run. They are created once, at the first save. Checkpoints store them, and an export writes
    them as files.
    """

    def __init__(self) -> None:
        self._made: Mapping[str, bytes] | None = None

    def sections(self, model: nn.Module, processing: object, *, is_first: bool) -> dict[str, object]:
        """The section with the documents of a transformers model. The first rank creates them with `save_pretrained`.

        Models with PEFT adapters have no documents: `from_pretrained` would use the documents to create a base model
        with new weights.

        processing  a tokenizer or processor, or None
        """
        inner = unwrapped(model)
        if not _is_pretrained(inner) or is_peft(inner) or getattr(inner, "_hf_peft_config_loaded", False):
            return {}
        if is_first and self._made is None:
            self._made = _create_documents(inner, processing)
        return {DOCUMENTS_SECTION: PerRank(self._made if is_first else None)}


def _is_pretrained(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")  # if transformers is not imported, the model is none of its models
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _create_documents(model: Any, processing: object) -> dict[str, bytes]:
    """The documents of configurations and tokenizer. Documents that cannot be written are left out; of two with the
    same name, the first is used.
    """
    parts: dict[str, Callable[[], Any]] = {
        "configuration": lambda: _configuration(model),
        "generation configuration": lambda: model.generation_config if model.can_generate() else None,
        "tokenizer or processor": lambda: processing,
    }
    documents: dict[str, bytes] = {}
    for name, part in parts.items():
        try:
            documents = {**_saved_files(part()), **documents}
        except Exception as error:  # any error of foreign code: a missing document must not end the training
            log.warning(
                "the model's %s is not stored in its checkpoints, because save_pretrained failed: %.500s; for an "
                "export, put it into a directory DIR and give `flowstone export` the option --documents DIR", name,
                error,
            )
    if sum(map(len, documents.values())) > DOCUMENTS_BYTES_MAX:
        log.warning(
            "the model's configuration and tokenizer are not stored in its checkpoints: they exceed %d bytes; for an "
            "export, put them into a directory DIR and give `flowstone export` the option --documents DIR",
            DOCUMENTS_BYTES_MAX,
        )
        return {}
    return documents


def _configuration(model: Any) -> Any:
    """The model's configuration, with the fields that its `save_pretrained` adds."""
    configuration = copy.deepcopy(model.config)
    configuration.dtype = str(model.dtype).removeprefix("torch.")
    # FSDP2 adds this prefix to the name of the class
    configuration.architectures = [type(model).__name__.removeprefix("FSDP")]
    return configuration


def _saved_files(part: Any) -> dict[str, bytes]:
    """The documents among the files that `save_pretrained` writes: name -> content."""
    if part is None:
        return {}
    documents: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="flowstone-documents-") as directory:
        part.save_pretrained(directory)
        for name in sorted(os.listdir(directory)):
            path = Path(directory, name)
            status = path.lstat()
            if not (is_document(name) and stat.S_ISREG(status.st_mode)):
                log.info(
                    "%.200s is not stored in the model's checkpoints: it is not a configuration or tokenizer file "
                    "that an export needs", name,
                )
            elif status.st_size > DOCUMENTS_BYTES_MAX:
                log.warning(
                    "%.200s is not stored in the model's checkpoints: it exceeds %d bytes; for an export, put it into "
                    "a directory DIR and give `flowstone export` the option --documents DIR", name, DOCUMENTS_BYTES_MAX,
                )
            else:
                documents[name] = path.read_bytes()
    return documents
