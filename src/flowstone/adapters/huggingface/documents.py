"""What `from_pretrained` asks for beside a model's weights: its configurations and its tokenizer."""

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


class Documents:
    """A run's documents, which its checkpoints keep and an export writes. Made once, at the first save."""

    def __init__(self) -> None:
        self._made: Mapping[str, bytes] | None = None

    def sections(self, model: nn.Module, processing: object, *, is_first: bool) -> dict[str, object]:
        """The section of documents, for models of transformers: what the first rank makes, by `save_pretrained`.

        Adapters have none: `from_pretrained` would make another base for them, of new weights.

        processing  a tokenizer or processor, or None
        """
        inner = unwrapped(model)
        if not _is_pretrained(inner) or is_peft(inner) or getattr(inner, "_hf_peft_config_loaded", False):
            return {}
        if is_first and self._made is None:
            self._made = _made(inner, processing)
        return {DOCUMENTS_SECTION: PerRank(self._made if is_first else None)}


def _is_pretrained(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")  # without it no model is one of its
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _made(model: Any, processing: object) -> dict[str, bytes]:
    """The documents of each part that can be written; of two with one name, the first."""
    parts: dict[str, Callable[[], Any]] = {
        "configuration": lambda: _configuration(model),
        "generation configuration": lambda: model.generation_config if model.can_generate() else None,
        "tokenizer or processor": lambda: processing,
    }
    found: dict[str, bytes] = {}
    for name, part in parts.items():
        try:
            found = {**_written(part()), **found}
        except Exception as error:  # of code that is not ours; training must not end for the want of a document
            log.warning(
                "the model's %s is not kept with its checkpoints, since save_pretrained failed: %.500s; "
                "`flowstone export` takes it from --documents DIR", name, error,
            )
    if sum(map(len, found.values())) > DOCUMENTS_BYTES_MAX:
        log.warning(
            "the model's configuration and tokenizer are not kept with its checkpoints: they have more than %d bytes; "
            "`flowstone export` takes them from --documents DIR", DOCUMENTS_BYTES_MAX,
        )
        return {}
    return found


def _configuration(model: Any) -> Any:
    """Its configuration, with what the model's own `save_pretrained` adds to it."""
    found = copy.deepcopy(model.config)
    found.dtype = str(model.dtype).removeprefix("torch.")
    found.architectures = [type(model).__name__.removeprefix("FSDP")]  # which FSDP2 puts before it
    return found


def _written(part: Any) -> dict[str, bytes]:
    """What its `save_pretrained` writes, but for what no document is."""
    if part is None:
        return {}
    found: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="flowstone-documents-") as directory:
        part.save_pretrained(directory)
        for name in sorted(os.listdir(directory)):
            path = Path(directory, name)
            held = path.lstat()
            if not (is_document(name) and stat.S_ISREG(held.st_mode)):
                log.info("%.200s is not kept with the model's checkpoints: it is no document", name)
            elif held.st_size > DOCUMENTS_BYTES_MAX:
                log.warning(
                    "%.200s is not kept with the model's checkpoints: it has more than %d bytes; "
                    "`flowstone export` takes it from --documents DIR", name, DOCUMENTS_BYTES_MAX,
                )
            else:
                found[name] = path.read_bytes()
    return found
