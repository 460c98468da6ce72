"""What a path is: the format of a checkpoint, told by its files."""

from __future__ import annotations

import os
from pathlib import Path

from flowstone.arguments import memory_of, store_path
from flowstone.checkpoint import Checkpoint, open_checkpoint
from flowstone.commit.entries import step_of
from flowstone.convert.documents import with_documents
from flowstone.convert.source import Source
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
from flowstone.store.base import Store
from flowstone.store.objects.urls import object_url
from flowstone.store.os_errors import translated


def open_source(path: str | os.PathLike[str] | Store | Checkpoint, step: int | None = None) -> Source:
    """The checkpoint at `path`, ready to be read: in a directory, of whatever format; in a bucket, a node's memory or a
    Store, of ours.

    step    of a store of ours; None: the newest

    raises  NotAStoreError where nothing there is known; ArgumentError; what the format's reader raises
    """
    if isinstance(path, Checkpoint):
        return with_documents(read_flowstone(path), path)
    if not isinstance(path, str | os.PathLike) or object_url(path) is not None or memory_of(path) is not None:
        return open_source(open_checkpoint(path, step))
    place = store_path(path)
    if _is_ours(place):
        return open_source(open_checkpoint(place, step))
    if step is not None:
        raise ArgumentError(f"{place} is no store of Flowstone, and has no steps", next="leave out the step")
    with translated(place, "look at", ""):
        return _read_foreign(place)


def _read_foreign(place: Path) -> Source:
    if not place.exists():
        raise NotAStoreError(f"there is nothing at {place}", next="check the path")
    if _is_deepspeed(place):  # before Megatron's: Megatron-DeepSpeed names its latest iteration in the same file, too
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
        f"{place} is no checkpoint that Flowstone knows",
        expected="a store or checkpoint of Flowstone, safetensors (a file, or a directory with its index), a file of "
        "torch.save, or a directory of torch.distributed.checkpoint, Megatron-core, DeepSpeed, TorchSnapshot or Orbax",
        next=_remedy(place),
    )


def _remedy(place: Path) -> str:
    """What to do about a path that is no checkpoint: files of torch.save are converted one by one."""
    files = sorted(inner for inner in place.iterdir() if is_torch_file(inner)) if place.is_dir() else []
    if not files:
        return "check the path"
    if len(files) == 1:
        return f"give the file of torch.save that is in it: {files[0]}"
    return (
        f"give one of the {len(files)} files that look like torch.save's: {files[0].name} to {files[-1].name}; parts "
        "of one model become safetensors by its library (transformers: `save_pretrained`), which come in together"
    )


def _is_deepspeed(place: Path) -> bool:
    """Whether it is DeepSpeed's; a Trainer's folder whose DeepSpeed part was deleted is its safetensors."""
    try:
        return is_deepspeed(place)
    except DamagedError:
        if is_safetensors(place):
            return False
        raise


def _is_ours(place: Path) -> bool:
    if not place.is_dir():
        return False
    names = os.listdir(place)
    return MARKER_NAME in names or MANIFEST_NAME in names or any(step_of(name) is not None for name in names)
