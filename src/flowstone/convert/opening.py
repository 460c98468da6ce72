"""Recognize the format of a checkpoint by its files, and open it."""

from __future__ import annotations

import os
from pathlib import Path

from flowstone.commit.entries import step_of
from flowstone.convert.documents import with_documents
from flowstone.convert.source import SourceCheckpoint
from flowstone.convert.sources.dcp import is_dcp, read_dcp
from flowstone.convert.sources.deepspeed import is_deepspeed, read_deepspeed
from flowstone.convert.sources.flowstone import read_flowstone
from flowstone.convert.sources.megatron import is_megatron, read_megatron
from flowstone.convert.sources.orbax import is_orbax, read_orbax
from flowstone.convert.sources.safetensors import is_safetensors, read_safetensors
from flowstone.convert.sources.torch_file import is_torch_file, read_torch_file
from flowstone.convert.sources.torchsnapshot import is_torchsnapshot, read_torchsnapshot
from flowstone.errors import ArgumentError, DamagedError, NotAStoreError
from flowstone.format.manifest import MANIFEST_NAME, MARKER_NAME
from flowstone.reading.checkpoint import Checkpoint, open_checkpoint
from flowstone.store.base import Store
from flowstone.store.os_errors import translated
from flowstone.store.urls import object_url
from flowstone.stores.arguments import memory_of, store_path


def open_source(path: str | os.PathLike[str] | Store | Checkpoint, step: int | None = None) -> SourceCheckpoint:
    """Open the checkpoint at `path`. In a directory, it may have any known format; in a bucket, a node's memory or a
    Store, only Flowstone's.

    step    a step of a Flowstone store; None: the newest

    raises  NotAStoreError  the format is not known
            ArgumentError; the errors of the format's reader
    """
    if isinstance(path, Checkpoint):
        return with_documents(read_flowstone(path), path)
    if not isinstance(path, str | os.PathLike) or object_url(path) is not None or memory_of(path) is not None:
        return open_source(open_checkpoint(path, step))
    place = store_path(path)
    if _is_flowstone(place):
        return open_source(open_checkpoint(place, step))
    if step is not None:
        raise ArgumentError(f"{place} is not a Flowstone store, so it has no steps", next="leave out the step")
    with translated(place, "look at", ""):
        return _read_recognized(place)


def _read_recognized(place: Path) -> SourceCheckpoint:
    if not place.exists():
        raise NotAStoreError(f"{place} does not exist", next="check the path")
    # checked before Megatron, as Megatron-DeepSpeed has the same file that names the latest iteration
    if _is_deepspeed(place):
        return read_deepspeed(place)
    if is_megatron(place):
        return read_megatron(place)
    if is_dcp(place):
        return read_dcp(place)
    if is_torchsnapshot(place):
        return read_torchsnapshot(place)
    if is_orbax(place):
        return read_orbax(place)
    if is_safetensors(place):
        return read_safetensors(place)
    if is_torch_file(place):
        return read_torch_file(place)
    raise NotAStoreError(
        f"{place} is not in a checkpoint format that Flowstone knows",
        expected="a Flowstone store or checkpoint, safetensors (a file, or a directory with its index), a file of "
        "torch.save, or a directory of torch.distributed.checkpoint, Megatron-core, DeepSpeed, TorchSnapshot or Orbax",
        next=_remedy(place),
    )


def _remedy(place: Path) -> str:
    """The advice for a path that is not a checkpoint. Files of torch.save, for example, are converted one by one."""
    files = sorted(inner for inner in place.iterdir() if is_torch_file(inner)) if place.is_dir() else []
    if not files:
        return "check the path"
    if len(files) == 1:
        return f"give the torch.save file in this directory: {files[0]}"
    return (
        f"give one of the {len(files)} torch.save files in this directory, {files[0].name} to {files[-1].name}; for a "
        "model in parts, save it as safetensors first (transformers: `save_pretrained`), which imports as one"
    )


def _is_deepspeed(place: Path) -> bool:
    """Whether this is a DeepSpeed checkpoint. A folder of transformers' Trainer whose DeepSpeed files were deleted is
    not; it is read as safetensors.
    """
    try:
        return is_deepspeed(place)
    except DamagedError:
        if is_safetensors(place):
            return False
        raise


def _is_flowstone(place: Path) -> bool:
    if not place.is_dir():
        return False
    names = os.listdir(place)
    return MARKER_NAME in names or MANIFEST_NAME in names or any(step_of(name) is not None for name in names)
