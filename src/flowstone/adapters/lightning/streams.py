"""A checkpoint as the stream that torch.save makes: for `load_from_checkpoint`, which takes a path or a stream."""

from __future__ import annotations

import io
import os

import torch

from flowstone.adapters.lightning.reading import read


def as_torch_file(path: str | os.PathLike[str]) -> io.BytesIO:
    """The checkpoint at `path` as a file of torch.save, in memory: `Model.load_from_checkpoint(as_torch_file(path))`.

    It is made of verified values; no stored byte is in it unseen. Raises what `fs.open` raises.
    """
    stream = io.BytesIO()
    torch.save(read(path), stream)
    stream.seek(0)
    return stream
