"""A checkpoint as a stream of torch.save, for Lightning's `load_from_checkpoint`, which accepts a path or a stream."""

from __future__ import annotations

import io
import os

import torch

from flowstone.adapters.lightning.reading import read


def as_torch_file(path: str | os.PathLike[str]) -> io.BytesIO:
    """The checkpoint at `path` as an in-memory torch.save file: `Model.load_from_checkpoint(as_torch_file(path))`.

    The file is built only from values that were verified and parsed. Raises the errors of `fs.open`.
    """
    stream = io.BytesIO()
    torch.save(read(path), stream)
    stream.seek(0)
    return stream
