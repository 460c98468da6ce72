"""Verification of journals: every frame that leads on from the newest checkpoint, and what lies behind a broken one.

A journal ends before the first frame that is not whole: after a crash that is the last one, or one of those that one
sync was to make durable. Whole frames behind these are steps that cannot be reached, as a frame before them is damaged.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from itertools import islice

import msgspec

from flowstone.commit import catalog, journals
from flowstone.commit.entries import Kind, is_journal_file, journal_file, parse
from flowstone.commit.journals import Chain
from flowstone.commit.manifests import inside
from flowstone.commit.verify import Finding
from flowstone.config import BLOCK_BYTES, MIB
from flowstone.errors import FormatError, StorageError
from flowstone.format.journal import MAGIC, STEP, Frame, decode_prefix
from flowstone.store.base import Names

_LOOKS = 5


class VerifiedJournals(msgspec.Struct, frozen=True):
    """The journals that lead on from a checkpoint: from step `base` to step `newest`."""

    base: int
    newest: int
    findings: tuple[Finding, ...]
    checked_bytes: int

    @property
    def sound(self) -> bool:
        return not self.findings


def verify_journals(store: Names) -> VerifiedJournals | None:
    """Read all frames that lead on from the newest checkpoint. None if there is no journal that could. Blocks.

    A job may go on meanwhile: what it removes, as it has a newer checkpoint, is looked for no more.

    raises  StorageError  a file cannot be read
    """
    for _ in range(_LOOKS):
        try:
            return _verified(store)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
    return None


def lost_steps(store: Names, chain: Chain | None) -> str:
    """Why a load does not come to steps that were durable, as something before them in the journals is damaged; "" if
    there are none such. Blocks; reads behind the last frame what is reserved there, or up to the first such step.

    chain  the newest one of the store

    What a crash leaves is not told: a frame that is not whole, and, of so many that one sync was to make durable, whole
    ones behind it.
    """
    end = journals.newest_end(store) if chain is None else chain
    last = None if end is None else end.end
    known = {one.directory: one for one in journals.listed(store)}
    by_id = {one.opening.id: one for one in known.values()}
    for name in _beyond_newest(store):
        journal = known.get(name)
        if journal is None or journal == last:
            torn_max = None if journal is None else journal.opening.torn_max
            finding = next(_unreachable(store, name, torn_max, is_first_enough=True), None)
            if finding is not None:
                return f"{finding.file}: {finding.what}"
        elif last is not None and journal.opening.number > last.opening.number:
            opening, parent = journal.opening, by_id.get(journal.opening.parent or "")
            if parent is None or not (steps := journals.common_steps(store, journal)):
                continue
            if opening.after not in (parent.opening.after, *journals.common_steps(store, parent)):
                return (
                    f"{name}: it goes on from step {opening.after}, which {parent.directory} has no more: steps "
                    f"{steps[0]} to {steps[-1]} cannot be reached"
                )
    return ""


def _beyond_newest(store: Names) -> list[str]:
    """The journals that begin at the newest checkpoint, or behind it."""
    committed = catalog.steps(store)
    return [
        name for name in store.names()
        if (one := parse(name)) is not None and one.kind is Kind.JOURNAL and not store.is_link(name)
        and committed and one.step is not None and one.step >= committed[-1]
    ]


def _verified(store: Names) -> VerifiedJournals | None:
    names = _beyond_newest(store)
    if not names:
        return None
    chain = journals.newest_chain(store) or Chain(catalog.steps(store)[-1], ())
    torn_max = {one.directory: one.opening.torn_max for one in journals.listed(store)}
    findings = [one for name in names for one in _unreachable(store, name, torn_max.get(name))]
    checked = 0
    for path, step, whole, length in _frames(store, chain):
        checked += length
        if not whole:
            findings.append(Finding(path, f"what replays step {step} is not what was written"))
    return VerifiedJournals(chain.base, chain.newest, tuple(findings), checked)


def _frames(store: Names, chain: Chain) -> Iterator[tuple[str, int, bool, int]]:
    """Each frame of the chain, of all ranks: its file, step, whether it is whole, and its length."""
    for part in chain.parts:
        for rank in range(part.journal.opening.ranks):
            path = inside(part.journal.directory, journal_file(rank))
            for place in journals.frames(store, part.journal, rank):
                if place.step <= part.until:
                    try:
                        whole = journals.is_whole(store, path, place)
                    except FormatError:  # its document contradicts itself
                        whole = False
                    yield path, place.step, whole, place.frame.frame_bytes


def _unreachable(
    store: Names, directory: str, torn_max: int | None, *, is_first_enough: bool = False
) -> Iterator[Finding]:
    """Steps of a journal that are behind a frame that is none any more.

    torn_max         how many frames a crash may have torn; None: the journal cannot be opened
    is_first_enough  of the steps of a file, only the first is looked for
    """
    for file in journals.files(store, directory) or ():
        if not is_journal_file(file):
            continue
        path, size = inside(directory, file), store.size(inside(directory, file))
        number, offset = -1, 0
        while (frame := _at(store, path, offset)) is not None and _belongs(frame, directory) and frame.number > number:
            number, offset = frame.number, offset + frame.frame_bytes
        if number > 0 and torn_max is None:
            yield Finding(path, f"its opening is not what was written: {number} step(s) behind it cannot be reached")
            continue
        found = _steps_behind(store, path, offset, size, directory, number + (torn_max or 1))
        behind = [*(islice(found, 1) if is_first_enough else found)]
        if behind and _at(store, path, offset) is None:  # else steps were appended meanwhile
            what = f"steps {behind[0]} to {behind[-1]}" if len(behind) > 1 else f"step {behind[0]}"
            what = f"{what} and what follows" if is_first_enough else f"{what} behind them"
            yield Finding(path, f"bytes {offset}.. are no frame any more: {what} cannot be reached")


def _steps_behind(store: Names, path: str, offset: int, size: int, directory: str, torn: int) -> Iterator[int]:
    """Steps of whole heads behind `offset`, from the first frame on that no crash could have left there: the one behind
    `torn`.
    """
    for begin in range(offset, size, MIB):
        data = store.read(path, offset=begin, length=MIB)
        at = data.find(MAGIC)
        while at >= 0:
            frame = _decoded(data[at : at + BLOCK_BYTES]) if at % BLOCK_BYTES == 0 else None
            if frame is not None and frame.kind == STEP and _belongs(frame, directory) and frame.number > torn:
                yield frame.step
            at = data.find(MAGIC, at + 1)


def _belongs(frame: Frame, directory: str) -> bool:
    return directory.endswith(frame.journal)


def _at(store: Names, path: str, offset: int) -> Frame | None:
    return _decoded(store.read(path, offset=offset, length=BLOCK_BYTES))


def _decoded(data: bytes) -> Frame | None:
    try:
        return decode_prefix(data)
    except FormatError:  # of a later version
        return None
