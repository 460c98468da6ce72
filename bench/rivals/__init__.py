"""Who takes part. One module for each rival, loaded in the process that measures it and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bench.rivals.base import Rival

OURS = "flowstone"


@dataclass(frozen=True, slots=True)
class Entry:
    """A rival in the programme.

    module  below this package; its `open_rival(name, directory)` gives the Rival
    saves   in one process: the first is cold, later ones find what it left (memory, plans, caches)
    loads   the ways to load what it saved; the first is the one that ratios are made of
    """

    name: str
    title: str
    module: str
    saves: int
    loads: tuple[str, ...]


ENTRIES = (
    Entry(OURS, "Flowstone", "ours", 3, ("Checkpointer.load",)),
    Entry("torch", "torch.save", "torch_save", 2, ("torch.load", "torch.load(mmap=True)")),
    Entry("safetensors", "safetensors", "safetensors_file", 2, ("load_file",)),
    Entry("dcp-1", "DCP, 1 thread", "dcp", 2, ("dcp.load",)),
    Entry("dcp-2", "DCP, 2 threads", "dcp", 2, ("dcp.load",)),
    Entry("dcp-async", "DCP async", "dcp", 2, ("dcp.load",)),
)


def entry(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.name == name)


def open_rival(name: str, directory: Path) -> Rival:
    """The rival, saving below `directory`, which exists and is its own."""
    rival: Rival = import_module(f"bench.rivals.{entry(name).module}").open_rival(name, directory)
    return rival
