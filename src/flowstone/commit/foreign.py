"""Checkpoints of other libraries, recognised by their files' names: for messages."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_OTHERS = (
    ("torch.distributed.checkpoint", r"\.metadata"),
    ("TorchSnapshot", r"\.snapshot_metadata"),
    ("Orbax", r"_METADATA|_CHECKPOINT_METADATA"),
    ("Megatron-core", r"latest_checkpointed_iteration\.txt"),
    ("DeepSpeed", r"global_step\d+|mp_rank_\d+_model_states\.pt|zero_pp_rank_.*\.pt"),
    ("safetensors", r".*\.safetensors(\.index\.json)?"),
    ("torch.save", r".*\.(pt|pth|bin)"),
)
"""Who may have written a directory, as names in it tell: the first that fits, as some write others' names, too."""


def remedy(location: str, names: Sequence[str]) -> str:
    """What to do about a path that holds `names` and nothing of ours."""
    is_file = names == ["a file"]
    looked_at = [os.path.basename(location)] if is_file else names
    for writer, known in _OTHERS:
        fitting = next((name for name in looked_at if re.fullmatch(known, name)), None)
        if fitting is not None:
            source = os.path.join(location, fitting) if writer == "torch.save" and not is_file else location
            return f"it looks like what {writer} writes: `flowstone import {source} RUN` makes a checkpoint of it"
    return "check the path"
