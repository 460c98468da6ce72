"""Which checkpoints several nodes have together, from what each of them holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from flowstone.format.manifest import MANIFEST_NAME
from flowstone.store.peers.parity import Contribution, Rebuilt, is_parity, rebuilt
from flowstone.store.peers.wire import Held

HIDDEN = ".peer-"  # begins names of what is on its way between nodes
_STEP = re.compile(r"step-\d{8,}", re.ASCII)


class Source(msgspec.Struct, frozen=True):
    """A file on a node."""

    node: int
    number: int
    size_bytes: int


class WholeStep(msgspec.Struct, frozen=True):
    """A checkpoint that is whole: its files, and which nodes have each, in the order in which they are to be asked.

    parity   the same of files with parity, which are in no list
    rebuilt  files that no node has, but that follow from the others
    """

    manifest: str
    files: Mapping[str, tuple[Source, ...]]
    parity: Mapping[str, tuple[Source, ...]] = {}
    rebuilt: Mapping[str, Rebuilt] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted((*self.files, *self.rebuilt)))


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


def see(
    held: Mapping[int, Held], own: int, segments: Callable[[str, str, Sequence[Source]], Mapping[str, int]],
    described: Callable[[str, Mapping[str, tuple[Source, ...]]], Mapping[str, Contribution]],
) -> View:
    """What there is together.

    held      by node, of those that answer
    own       this node: its files are read first, then those of the nodes that follow
    segments  names and sizes of a checkpoint's segments, from its directory, its manifest's digest, and where that is
    described  what its parity is of, from its directory, and the files of that; {}: parity is of no use here

    A checkpoint is whole if each of its segments is somewhere, on a node that has the same manifest, or follows from
    what is on such nodes: so no file of another one of that step is taken for it. A node that was away when a later job
    began to save, so that its epoch is older, adds files to checkpoints that others know, but none of its own: these
    are from before.
    """
    epoch = max((one.epoch for one in held.values()), default=0)
    known = {(name, step.manifest) for one in held.values() if one.epoch == epoch for name, step in one.steps.items()}
    names = {name for one in held.values() for name in one.names if not name.startswith(HIDDEN)}
    steps: dict[str, WholeStep] = {}
    lacks: dict[str, str] = {}
    for name in sorted({name for one in held.values() for name in one.steps}):
        for manifest in sorted({one.steps[name].manifest for one in held.values() if name in one.steps}):
            if (name, manifest) not in known:
                lacks.setdefault(name, "it is from before the job that saved last")
                continue
            files, parity = _files(held, name, manifest, own)
            missing = _missing(files, wanted := segments(name, manifest, files[MANIFEST_NAME]))
            again: Mapping[str, Rebuilt] = {}
            if missing and parity:
                again = _rebuilt(missing, files, parity, described(name, parity))
                missing = {one: size_bytes for one, size_bytes in missing.items() if one not in again}
            if missing:
                lacks[name] = _lack(missing, len(wanted), is_short=bool(parity))
            else:
                files = {one: sources for one, sources in files.items() if one not in again}
                steps[name] = WholeStep(manifest, files, parity, again)
        if name in steps:
            lacks.pop(name, None)
    return View(epoch, tuple(sorted(names - lacks.keys())), steps, lacks)


def _files(
    held: Mapping[int, Held], name: str, manifest: str, own: int
) -> tuple[dict[str, tuple[Source, ...]], dict[str, tuple[Source, ...]]]:
    """Which nodes have each file; and those with parity apart."""
    found: dict[str, list[Source]] = {}
    last = max(held) + 1
    for node in sorted(held, key=lambda node: (node - own) % last):
        step = held[node].steps.get(name)
        if step is not None and step.manifest == manifest:
            for file, (number, size_bytes) in step.files.items():
                found.setdefault(file, []).append(Source(node, number, size_bytes))
    files: dict[str, tuple[Source, ...]] = {}
    parity: dict[str, tuple[Source, ...]] = {}
    for file, sources in found.items():
        (parity if is_parity(file) else files)[file] = tuple(sources)
    return files, parity


def _missing(files: Mapping[str, tuple[Source, ...]], segments: Mapping[str, int]) -> dict[str, int]:
    return {
        name: size_bytes for name, size_bytes in segments.items()
        if not any(source.size_bytes == size_bytes for source in files.get(name, ()))
    }


def _rebuilt(
    missing: Mapping[str, int], files: Mapping[str, tuple[Source, ...]], parity: Mapping[str, tuple[Source, ...]],
    described: Mapping[str, Contribution],
) -> Mapping[str, Rebuilt]:
    if not described:
        return {}
    available = {
        name: sources[0].size_bytes for name, sources in {**files, **parity}.items() if name not in missing
    }
    return rebuilt(missing, available, described, lambda name: parity[name][0].number)


def _lack(missing: Mapping[str, int], segments: int, *, is_short: bool) -> str:
    """In words."""
    names = list(missing)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    more = ", and too little else of its group to rebuild it" if is_short else ""
    return f"{shown} of {segments} segments in the memory of no node that answers{more}"
