"""DeepSpeed's files in a Flowstone checkpoint: which files each rank has, and their content."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flowstone.adapters.deepspeed.values import decode_state
from flowstone.errors import NoTensorError
from flowstone.reading.checkpoint import Checkpoint

SECTIONS = ("model_states", "optim_states", "other_states")
_KIND = re.compile(r"(model|optim)_states\.pt$")


def section_of(name: str) -> str:
    match = _KIND.search(name)
    return "other_states" if match is None else f"{match[1]}_states"


def file_names(checkpoint: Checkpoint) -> list[list[object]]:
    """For each rank, the names of its files."""
    names_by_rank = checkpoint.contents.per_rank.get("files", ())
    return [names if isinstance(names, list) else [] for names in names_by_rank]


def read_file(checkpoint: Checkpoint, name: str) -> Any:
    """The content of a file, read from the rank that saved it. Raises NoTensorError."""
    rank = _saved_by(checkpoint, name)
    return decode_state(checkpoint.state_dict(section_of(name), rank=rank)[name])


def stored_file(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    """The stored object of a file. Its tensors are not read. Raises NoTensorError."""
    rank = _saved_by(checkpoint, name)
    stored: Any = checkpoint.contents.per_rank[section_of(name)][rank]
    content: Mapping[str, Any] = stored[name]
    return content


def _saved_by(checkpoint: Checkpoint, name: str) -> int:
    for rank, names in enumerate(file_names(checkpoint)):
        if name in names:
            return rank
    raise NoTensorError(
        f"{checkpoint.path} has no file {name}", next="load a tag that was saved by as many ranks as this job has"
    )
