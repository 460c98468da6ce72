"""The files of DeepSpeed's that a checkpoint of ours holds: which rank has saved which, and what is in one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flowstone.adapters.deepspeed.values import decoded
from flowstone.checkpoint import Checkpoint
from flowstone.errors import NoTensorError

SECTIONS = ("model_states", "optim_states", "other_states")
_KIND = re.compile(r"(model|optim)_states\.pt$")


def section_of(name: str) -> str:
    found = _KIND.search(name)
    return "other_states" if found is None else f"{found[1]}_states"


def file_names(checkpoint: Checkpoint) -> list[list[object]]:
    """What each rank has saved."""
    found = checkpoint.contents.per_rank.get("files", ())
    return [names if isinstance(names, list) else [] for names in found]


def read_file(checkpoint: Checkpoint, name: str) -> Any:
    """A file's content, of the rank that saved it. Raises NoTensorError."""
    rank = _saved_by(checkpoint, name)
    return decoded(checkpoint.state_dict(section_of(name), rank=rank)[name])


def stored_file(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    """The stored object of a file, in which no tensor is read yet. Raises NoTensorError."""
    rank = _saved_by(checkpoint, name)
    stored: Any = checkpoint.contents.per_rank[section_of(name)][rank]
    found: Mapping[str, Any] = stored[name]
    return found


def _saved_by(checkpoint: Checkpoint, name: str) -> int:
    for rank, names in enumerate(file_names(checkpoint)):
        if name in names:
            return rank
    raise NoTensorError(f"{checkpoint.path} has no {name}", next="load a tag that as many ranks have saved")
