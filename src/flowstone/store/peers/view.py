"""Which checkpoints several nodes have together, from what each of them holds. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from flowstone.format.manifest import MANIFEST_NAME
from flowstone.store.peers.wire import Held

HIDDEN = ".peer-"  # begins names of what is on its way between nodes
_STEP = re.compile(r"step-\d{8,}", re.ASCII)


class Source(msgspec.Struct, frozen=True):
    """A file on a node."""

    node: int
    number: int
    size_bytes: int


class WholeStep(msgspec.Struct, frozen=True):
    """A checkpoint that is whole: its files, and which nodes have each, in the order in which they are to be asked."""

    manifest: str
    files: Mapping[str, tuple[Source, ...]]


class View(msgspec.Struct, frozen=True):
    """What several nodes hold together.

    epoch  the newest of theirs
    names  in the root, without directories of checkpoints that are not whole
    steps  those that are whole, by directory
    lacks  of the others, why they are not
    """

    epoch: int
    names: tuple[str, ...]
    steps: Mapping[str, WholeStep]
    lacks: Mapping[str, str]


def is_step(name: str) -> bool:
    return _STEP.fullmatch(name) is not None


def see(held: Mapping[int, Held], own: int, segments: Callable[[str, str, Source], Mapping[str, int]]) -> View:
    """What there is together.

    held      by node, of those that answer
    own       this node: its files are read first, then those of the nodes that follow
    segments  names and sizes of a checkpoint's segments, from its directory, its manifest's digest, and where that is

    A checkpoint is whole if each of its segments is somewhere, on a node that has the same manifest: so no file of
    another one of that step is taken for it. A node that was away when a later job began to save, so that its epoch is
    older, adds files to checkpoints that others know, but none of its own: these are of before.
    """
    epoch = max((one.epoch for one in held.values()), default=0)
    known = {(name, step.manifest) for one in held.values() if one.epoch == epoch for name, step in one.steps.items()}
    names = {name for one in held.values() for name in one.names if not name.startswith(HIDDEN)}
    steps: dict[str, WholeStep] = {}
    lacks: dict[str, str] = {}
    for name in sorted({name for one in held.values() for name in one.steps}):
        for manifest in sorted({one.steps[name].manifest for one in held.values() if name in one.steps}):
            if (name, manifest) not in known:
                lacks.setdefault(name, "it is of before the job that saved last")
                continue
            files = _files(held, name, manifest, own)
            lack = _lack(files, segments(name, manifest, files[MANIFEST_NAME][0]))
            if lack:
                lacks[name] = lack
            else:
                steps[name] = WholeStep(manifest, files)
        if name in steps:
            lacks.pop(name, None)
    return View(epoch, tuple(sorted(names - lacks.keys())), steps, lacks)


def _files(held: Mapping[int, Held], name: str, manifest: str, own: int) -> dict[str, tuple[Source, ...]]:
    found: dict[str, list[Source]] = {}
    last = max(held) + 1
    for node in sorted(held, key=lambda node: (node - own) % last):
        step = held[node].steps.get(name)
        if step is not None and step.manifest == manifest:
            for file, (number, size_bytes) in step.files.items():
                found.setdefault(file, []).append(Source(node, number, size_bytes))
    return {file: tuple(sources) for file, sources in found.items()}


def _lack(files: Mapping[str, tuple[Source, ...]], segments: Mapping[str, int]) -> str:
    """What is missing; "" if nothing is."""
    missing = [
        name for name, size_bytes in segments.items()
        if not any(source.size_bytes == size_bytes for source in files.get(name, ()))
    ]
    if not missing:
        return ""
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return f"{shown} of {len(segments)} segments in the memory of no node that answers"
