"""Verification of journals: checks every frame after the newest checkpoint, and finds steps after a damaged frame.

A journal ends before its first incomplete frame (record of one step). A crash can leave only the frames of the last
sync incomplete: at most `torn_max` (of the JournalHeader). A complete frame more than `torn_max` frames after the
journal's last one shows that a frame between them is damaged. The step of that complete frame cannot be loaded.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from itertools import islice

import msgspec

from flowstone.commit import catalog
from flowstone.commit.entries import EntryKind, is_journal_file, journal_file, parse_entry
from flowstone.commit.manifests import path_inside
from flowstone.commit.verify import Finding
from flowstone.config import BLOCK_BYTES, MIB
from flowstone.errors import FormatError, StorageError
from flowstone.journal import journals
from flowstone.journal.journal_format import MAGIC, STEP, FramePrefix, decode_prefix
from flowstone.journal.journals import Chain
from flowstone.store.base import Names

_READS_MAX = 5  # attempts while a job removes journals


class VerifiedJournals(msgspec.Struct, frozen=True):
    """The result for the journals after a checkpoint: from step `base` to step `newest`."""

    base: int
    newest: int
    findings: tuple[Finding, ...]
    checked_bytes: int

    @property
    def sound(self) -> bool:
        return not self.findings


def verify_journals(store: Names) -> VerifiedJournals | None:
    """Check all frames after the newest checkpoint. None if there is no journal after it. Blocks.

    A job may run meanwhile: if it removes journals because it has a newer checkpoint, the check starts again.

    raises  StorageError  a file cannot be read
    """
    for _ in range(_READS_MAX):
        try:
            return _verified(store)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
    return None


def explain_lost_steps(store: Names, chain: Chain | None) -> str:
    """Describe a damaged journal frame because of which later durable steps cannot be loaded; "" if none. Blocks; reads
    the reserved space after the last frame, up to the first such step.

    chain  the newest chain of the store

    Traces of a crash are not reported: an incomplete frame, and later frames of the same sync.
    """
    end = journals.newest_chain_or_empty(store) if chain is None else chain
    last = None if end is None else end.end
    by_directory = {journal.directory: journal for journal in journals.list_journals(store)}
    by_id = {journal.header.id: journal for journal in by_directory.values()}
    for name in _beyond_newest(store):
        journal = by_directory.get(name)
        if journal is None or journal == last:
            torn_max = None if journal is None else journal.header.torn_max
            finding = next(_unreachable(store, name, torn_max, is_first_enough=True), None)
            if finding is not None:
                return f"{finding.file}: {finding.what}"
        elif last is not None and journal.header.number > last.header.number:
            opening, parent = journal.header, by_id.get(journal.header.parent or "")
            if parent is None or not (steps := journals.common_steps(store, journal)):
                continue
            if opening.after not in (parent.header.after, *journals.common_steps(store, parent)):
                return (
                    f"{name}: it continues after step {opening.after}, which {parent.directory} no longer has; steps "
                    f"{steps[0]} to {steps[-1]} cannot be loaded"
                )
    return ""


def _beyond_newest(store: Names) -> list[str]:
    """The directories of the journals that begin at the newest checkpoint, or at a later step."""
    committed = catalog.steps(store)
    return [
        name for name in store.names()
        if (entry := parse_entry(name)) is not None and entry.kind is EntryKind.JOURNAL and not store.is_link(name)
        and committed and entry.step is not None and entry.step >= committed[-1]
    ]


def _verified(store: Names) -> VerifiedJournals | None:
    names = _beyond_newest(store)
    if not names:
        return None
    chain = journals.newest_chain(store) or Chain(catalog.steps(store)[-1], ())
    torn_max = {finding.directory: finding.header.torn_max for finding in journals.list_journals(store)}
    findings = [finding for name in names for finding in _unreachable(store, name, torn_max.get(name))]
    checked = 0
    for path, step, whole, length in _frames(store, chain):
        checked += length
        if not whole:
            findings.append(Finding(path, f"the frame of step {step} does not match its digest"))
    return VerifiedJournals(chain.base, chain.newest, tuple(findings), checked)


def _frames(store: Names, chain: Chain) -> Iterator[tuple[str, int, bool, int]]:
    """For each frame of the chain, of all ranks: its file, its step, whether it is complete, and its length."""
    for part in chain.parts:
        for rank in range(part.journal.header.ranks):
            path = path_inside(part.journal.directory, journal_file(rank))
            for place in journals.complete_frames(store, part.journal, rank):
                if place.step <= part.until:
                    try:
                        whole = journals.is_complete(store, path, place)
                    except FormatError:  # the frame's document contradicts itself
                        whole = False
                    yield path, place.step, whole, place.frame.frame_bytes


def _unreachable(
    store: Names, directory: str, torn_max: int | None, *, is_first_enough: bool = False
) -> Iterator[Finding]:
    """Report the steps of a journal that are complete, but cannot be loaded, because a damaged frame precedes them.

    torn_max         how many frames a crash may leave incomplete; None: the journal cannot be opened
    is_first_enough  find only the first such step of each file
    """
    for file in journals.journal_files(store, directory) or ():
        if not is_journal_file(file):
            continue
        path, size = path_inside(directory, file), store.size(path_inside(directory, file))
        number, offset = -1, 0
        while (frame := _at(store, path, offset)) is not None and _belongs(frame, directory) and frame.number > number:
            number, offset = frame.number, offset + frame.frame_bytes
        if number > 0 and torn_max is None:
            yield Finding(path, f"its header does not match its digest; {number} step(s) after it cannot be loaded")
            continue
        reachable = _steps_behind(store, path, offset, size, directory, number + (torn_max or 1))
        behind = [*(islice(reachable, 1) if is_first_enough else reachable)]
        if behind and _at(store, path, offset) is None:  # if not None, steps were appended meanwhile
            steps = f"steps {behind[0]} to {behind[-1]}" if len(behind) > 1 else f"step {behind[0]}"
            steps += " and later steps" if is_first_enough else " after it"
            yield Finding(path, f"the frame at byte {offset} is damaged; {steps} cannot be loaded")


def _steps_behind(store: Names, path: str, offset: int, size: int, directory: str, torn: int) -> Iterator[int]:
    """The steps of readable frames after `offset` that have a frame number above `torn`. A crash leaves no incomplete
    frame that far before a complete one, so the frame at `offset` must be damaged.
    """
    for begin in range(offset, size, MIB):
        data = store.read(path, offset=begin, length=MIB)
        position = data.find(MAGIC)
        while position >= 0:
            frame = _decoded(data[position : position + BLOCK_BYTES]) if position % BLOCK_BYTES == 0 else None
            if frame is not None and frame.kind == STEP and _belongs(frame, directory) and frame.number > torn:
                yield frame.step
            position = data.find(MAGIC, position + 1)


def _belongs(frame: FramePrefix, directory: str) -> bool:
    return directory.endswith(frame.journal)


def _at(store: Names, path: str, offset: int) -> FramePrefix | None:
    return _decoded(store.read(path, offset=offset, length=BLOCK_BYTES))


def _decoded(data: bytes) -> FramePrefix | None:
    try:
        return decode_prefix(data)
    except FormatError:  # the frame was written by a later version
        return None
