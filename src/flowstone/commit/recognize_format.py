"""Recognises checkpoints of other libraries by their file names, for error messages."""

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
"""The library that may have written a directory, by a file name in it. The first match counts: some libraries also
write other libraries' files.
"""


def import_hint(location: str, names: Sequence[str]) -> str:
    """The advice (`next=`) of an error for a directory that has files `names` but is not a store: how to import it, if
    the names are those of another library's checkpoint.
    """
    is_file = names == ["a file"]
    looked_at = [os.path.basename(location)] if is_file else names
    for writer, pattern in _OTHERS:
        fitting = next((name for name in looked_at if re.fullmatch(pattern, name)), None)
        if fitting is not None:
            source = os.path.join(location, fitting) if writer == "torch.save" and not is_file else location
            return f"it looks like a checkpoint of {writer}: convert it by `flowstone import {source} RUN`"
    return "check the path"
