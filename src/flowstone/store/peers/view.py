"""Merge the nodes' inventories (lists of files), to find the checkpoints that the nodes have together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from flowstone.format.manifest import MANIFEST_NAME
from flowstone.store.peers.parity import ParityContribution, RebuildPlan, is_parity, plan_rebuilds
from flowstone.store.peers.wire import PeerInventory

HIDDEN = ".peer-"  # names of files that are in transfer between nodes begin with this
_STEP = re.compile(r"step-\d{8,}", re.ASCII)


class FileSource(msgspec.Struct, frozen=True):
    """A node that has a file, and the file's number and size there."""

    node: int
    number: int
    size_bytes: int


class CompleteStep(msgspec.Struct, frozen=True):
    """A complete checkpoint: for each file, the nodes that have it, in the order in which to try them.

    parity   for each parity file (not in listings), the nodes that have it
    rebuilt  for each file that no node has, but that parity determines: how to compute it
    """

    manifest: str
    files: Mapping[str, tuple[FileSource, ...]]
    parity: Mapping[str, tuple[FileSource, ...]] = {}
    rebuilt: Mapping[str, RebuildPlan] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted((*self.files, *self.rebuilt)))


class View(msgspec.Struct, frozen=True):
    """The merged inventories of several nodes.

    epoch  the highest epoch of any node (see PeerInventory)
    names  the entries at the store's root, without incomplete checkpoints
    steps  the complete checkpoints: directory -> checkpoint
    incomplete  the incomplete checkpoints: directory -> why it is incomplete
    """

    epoch: int
    names: tuple[str, ...]
    steps: Mapping[str, CompleteStep]
    incomplete: Mapping[str, str]


def is_step(name: str) -> bool:
    return _STEP.fullmatch(name) is not None


def merge_inventories(
    inventories: Mapping[int, PeerInventory], own: int,
    segments: Callable[[str, str, Sequence[FileSource]], Mapping[str, int]],
    described: Callable[[str, Mapping[str, tuple[FileSource, ...]]], Mapping[str, ParityContribution]],
) -> View:
    """Merge the inventories of the nodes that answer.

    inventories  number of a node -> its inventory
    own          the number of this node, whose files are read first; then come those of the following nodes
    segments     returns names and sizes of a checkpoint's segments, given its directory, its manifest's digest, and
                 the nodes that have the manifest
    described    returns the descriptions of a checkpoint's parity, given its directory and parity files; {} if parity
                 cannot be used

    A checkpoint is complete if the nodes that have its manifest also have each of its segments, or files from which
    the segment can be computed. So files of another checkpoint of that step are not mixed in. A node that was down when
    a later job began to save has an older epoch. Its files are used only for checkpoints that a node with the newest
    epoch has as well; its other checkpoints are outdated.
    """
    epoch = max((inventory.epoch for inventory in inventories.values()), default=0)
    newest = [inventory for inventory in inventories.values() if inventory.epoch == epoch]
    current = {(name, step.manifest) for inventory in newest for name, step in inventory.steps.items()}
    names = {name for inventory in inventories.values() for name in inventory.names if not name.startswith(HIDDEN)}
    manifests: dict[str, set[str]] = {}
    for inventory in inventories.values():
        for name, step in inventory.steps.items():
            manifests.setdefault(name, set()).add(step.manifest)
    steps: dict[str, CompleteStep] = {}
    lacks: dict[str, str] = {}
    for name in sorted(manifests):
        for manifest in sorted(manifests[name]):
            if (name, manifest) not in current:
                lacks.setdefault(name, "only nodes that were down when a later job began have it")
                continue
            files, parity = _files(inventories, name, manifest, own)
            missing = _missing(files, needed := segments(name, manifest, files[MANIFEST_NAME]))
            rebuilt_files: Mapping[str, RebuildPlan] = {}
            if missing and parity:
                rebuilt_files = _rebuilt(missing, files, parity, described(name, parity))
                missing = {file: size_bytes for file, size_bytes in missing.items() if file not in rebuilt_files}
            if missing:
                lacks[name] = _gaps(missing, len(needed), is_short=bool(parity))
            else:
                files = {file: sources for file, sources in files.items() if file not in rebuilt_files}
                steps[name] = CompleteStep(manifest, files, parity, rebuilt_files)
        if name in steps:
            lacks.pop(name, None)
    return View(epoch, tuple(sorted(names - lacks.keys())), steps, lacks)


def _files(
    inventories: Mapping[int, PeerInventory], name: str, manifest: str, own: int
) -> tuple[dict[str, tuple[FileSource, ...]], dict[str, tuple[FileSource, ...]]]:
    """Two mappings, for files and for parity files: name of the file -> the nodes that have it."""
    by_file: dict[str, list[FileSource]] = {}
    last = max(inventories) + 1
    for node in sorted(inventories, key=lambda node: (node - own) % last):
        step = inventories[node].steps.get(name)
        if step is not None and step.manifest == manifest:
            for file, (number, size_bytes) in step.files.items():
                by_file.setdefault(file, []).append(FileSource(node, number, size_bytes))
    files: dict[str, tuple[FileSource, ...]] = {}
    parity: dict[str, tuple[FileSource, ...]] = {}
    for file, sources in by_file.items():
        (parity if is_parity(file) else files)[file] = tuple(sources)
    return files, parity


def _missing(files: Mapping[str, tuple[FileSource, ...]], segments: Mapping[str, int]) -> dict[str, int]:
    return {
        name: size_bytes for name, size_bytes in segments.items()
        if not any(source.size_bytes == size_bytes for source in files.get(name, ()))
    }


def _rebuilt(
    missing: Mapping[str, int], files: Mapping[str, tuple[FileSource, ...]],
    parity: Mapping[str, tuple[FileSource, ...]],
    described: Mapping[str, ParityContribution],
) -> Mapping[str, RebuildPlan]:
    if not described:
        return {}
    available = {
        name: sources[0].size_bytes for name, sources in {**files, **parity}.items() if name not in missing
    }
    return plan_rebuilds(missing, available, described, lambda name: parity[name][0].number)


def _gaps(missing: Mapping[str, int], segments: int, *, is_short: bool) -> str:
    """Why a checkpoint is incomplete, as text for a message."""
    names = list(missing)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    more = ", and the remaining parity cannot rebuild them" if is_short else ""
    return f"of its {segments} files of tensors, no node that answers has {shown}{more}"
