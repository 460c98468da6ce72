"""Journals of a store: which there are, to which step they lead, and which may go (docs/FORMAT.md, Journal).

Without torch; imported only where a store has a journal, or one is to be written.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial

import msgspec

from flowstone.commit import catalog, removal, retention
from flowstone.commit.durable import sync
from flowstone.commit.entries import (
    Kind,
    is_journal_file,
    journal_directory,
    journal_file,
    new_deleting,
    new_superseded_directory,
    parse,
    step_directory,
)
from flowstone.commit.manifests import inside, read_manifest
from flowstone.config import BLOCK_BYTES
from flowstone.errors import DamagedError, FormatError, NoCheckpointError, StorageError, is_damage
from flowstone.format.digest import digest
from flowstone.format.journal import (
    OPENING,
    STEP,
    Frame,
    Opening,
    StepRow,
    decode_document,
    decode_prefix,
    encode_head,
)
from flowstone.format.manifest import Manifest
from flowstone.log import log
from flowstone.store.base import Names, Store

_LOOKS = 5  # while a job removes journals


class FramePlace(msgspec.Struct, frozen=True):
    """A frame of a step in its file."""

    step: int
    offset: int
    frame: Frame


class Journal(msgspec.Struct, frozen=True):
    """A journal that can be opened, by the opening of its first file."""

    directory: str
    opening: Opening


class Part(msgspec.Struct, frozen=True):
    """The steps of a chain that lie in one journal: those above `after`, up to `until`."""

    journal: Journal
    until: int


class Chain(msgspec.Struct, frozen=True):
    """What leads from a committed checkpoint to the newest durable step.

    parts  in order; the last one's `until` is that step
    end    the journal whose end is that of the chain; it may have no steps. None: it is cut before that
    """

    base: int
    parts: tuple[Part, ...]
    end: Journal | None = None

    @property
    def newest(self) -> int:
        return self.parts[-1].until if self.parts else self.base

    def steps(self, store: Names, rank: int) -> Iterator[tuple[Part, FramePlace]]:
        """The frames of a rank, in order."""
        for part in self.parts:
            for place in frames(store, part.journal, rank):
                if place.step <= part.until:
                    yield part, place

    def ends_at(self, store: Names, step: int) -> bool:
        """Whether the last journal has a frame of `step`."""
        return any(place.step == step for place in frames(store, self.parts[-1].journal, 0))

    def up_to(self, step: int) -> Chain:
        """The same, to a step on the way."""
        parts = [part for part in self.parts if part.journal.opening.after < step]
        cut = [msgspec.structs.replace(part, until=min(part.until, step)) for part in parts]
        return Chain(self.base, tuple(cut))


def listed(store: Names) -> list[Journal]:
    """All that can be opened, the newest first. Those that cannot are passed over: a crash may have left them."""
    found = []
    for name in store.names():
        entry = parse(name)
        if entry is None or entry.kind is not Kind.JOURNAL or store.is_link(name):
            continue
        for file in files(store, name) or ():
            opening = _opening(store, name, file)
            if opening is not None and journal_directory(opening.after, opening.id) == name:
                found.append(Journal(name, opening))
                break
    return sorted(found, key=lambda one: one.opening.number, reverse=True)


def files(store: Names, directory: str) -> tuple[str, ...] | None:
    """The names in a journal's directory; None if it is another program's file, or was removed meanwhile."""
    try:
        return store.names(directory)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None


def _opening(store: Names, directory: str, file: str) -> Opening | None:
    """The opening of a file; None if it is torn, or none of ours."""
    path = inside(directory, file)
    if not is_journal_file(file):
        return None
    try:
        frame = _frame_at(store, path, 0)
        if frame is None or frame.kind != OPENING:
            return None
        data = store.read(path, length=frame.payload_offset)
        return decode_document(data, frame, Opening, path=f"{store.location}/{path}")
    except (FormatError, StorageError) as error:
        if isinstance(error, StorageError) and error.errno == errno.ENOENT:
            return None  # safe: removed since its directory was listed, for a newer checkpoint
        log.warning("cannot open the journal %s/%s: %s", store.location, path, error)
        return None


def opening_of(store: Names, journal: Journal, rank: int) -> Opening:
    """The opening of a rank's file. Raises DamagedError if it is not of that journal."""
    if journal.opening.rank == rank:
        return journal.opening
    file = journal_file(rank)
    found = _opening(store, journal.directory, file)
    if found is None or _common(found) != _common(journal.opening) or found.rank != rank:
        raise DamagedError(
            f"{store.location}/{inside(journal.directory, file)} is damaged: it does not begin as others do",
            next=f"load(step={journal.opening.after}), or an older checkpoint",
        )
    return found


def _common(opening: Opening) -> tuple[object, ...]:
    """What is the same in the files of all ranks."""
    begins = opening.after, opening.checkpoint, opening.parent
    return opening.id, opening.number, *begins, opening.ranks, opening.torn_max


def _frame_at(store: Names, path: str, offset: int) -> Frame | None:
    return decode_prefix(store.read(path, offset=offset, length=BLOCK_BYTES))


def frames(store: Names, journal: Journal, rank: int) -> list[FramePlace]:
    """A rank's steps, up to the first frame that is not whole. Of all but the last, payloads are not read here.

    A frame is written only once the one before it is durable, so a crash tears the last one alone; or once the one
    that is `torn_max` before it is, so it may have torn any of so many.
    """
    path = inside(journal.directory, journal_file(rank))
    if not store.exists(path):
        return []
    size, found = store.size(path), list[FramePlace]()
    frame = _frame_at(store, path, 0)
    if frame is None or frame.journal != journal.opening.id or frame.kind != OPENING:
        return []
    place = FramePlace(frame.step, 0, frame)
    while (after := _frame_after(store, path, size, place)) is not None:
        place = after
        found.append(place)
    for at in range(max(len(found) - journal.opening.torn_max, 0), len(found)):
        if not is_whole(store, path, found[at]):
            return found[:at]
    return found


def next_frame(store: Names, journal: Journal, rank: int, last: FramePlace | None) -> FramePlace | None:
    """The frame behind `last`, or behind the opening, if its begin is there. Its payload is not read here."""
    path = inside(journal.directory, journal_file(rank))
    if last is None:
        frame = _frame_at(store, path, 0)
        if frame is None or frame.journal != journal.opening.id or frame.kind != OPENING:
            return None
        last = FramePlace(frame.step, 0, frame)
    return _frame_after(store, path, store.size(path), last)


def _frame_after(store: Names, path: str, size: int, last: FramePlace) -> FramePlace | None:
    end = last.offset + last.frame.frame_bytes
    frame = _frame_at(store, path, end) if end < size else None
    if frame is None or frame.kind != STEP or frame.journal != last.frame.journal:
        return None
    if frame.number != last.frame.number + 1 or frame.step <= last.step or end + frame.frame_bytes > size:
        return None
    return FramePlace(frame.step, end, frame)


def is_whole(store: Names, path: str, place: FramePlace) -> bool:
    """Whether a frame's document and tensors are what was written. Raises DamagedError if it contradicts itself."""
    frame = place.frame
    head = store.read(path, offset=place.offset, length=frame.payload_offset)
    row = decode_document(head, frame, StepRow, path=f"{store.location}/{path}")
    if row is None:
        return False
    begin = place.offset + frame.payload_offset
    for tensor in row.tensors:
        data = store.read(path, offset=begin + tensor.offset, length=tensor.bytes)
        if len(data) < tensor.bytes or digest(data) != tensor.digest:
            return False
    return True


class JournalMakeup(msgspec.Struct, frozen=True):
    """What a journal is made up of.

    first, last  steps that the files of all its ranks have; None: none yet
    frames       of steps, of all ranks
    bytes        of these and of the openings; a file may have more, reserved for what comes
    lag_steps    that it was written with
    """

    name: str
    ranks: int
    first: int | None
    last: int | None
    frames: int
    bytes: int
    lag_steps: int


def following(store: Names, manifest: Manifest) -> tuple[JournalMakeup, ...]:
    """The journals that begin at a checkpoint, and those that go on from these, in the order in which they began."""
    ids: set[str] = set()
    found = []
    for journal in reversed(listed(store)):
        opening = journal.opening
        begins = opening.after == manifest.step and opening.checkpoint == manifest.id
        if begins or opening.parent in ids:
            ids.add(opening.id)
            found.append(_makeup(store, journal))
    return tuple(found)


def _makeup(store: Names, journal: Journal) -> JournalMakeup:
    frames_, bytes_ = 0, 0
    for file in store.names(journal.directory):
        if is_journal_file(file):
            opening = _frame_at(store, inside(journal.directory, file), 0)
            places = frames(store, journal, int(file[len("rank-") : -len(".journal")]))
            frames_ += len(places)
            bytes_ += sum(one.frame.frame_bytes for one in places) + (0 if opening is None else opening.frame_bytes)
    steps = common_steps(store, journal)
    first, last = (steps[0], steps[-1]) if steps else (None, None)
    lag_steps = journal.opening.torn_max
    return JournalMakeup(journal.directory, journal.opening.ranks, first, last, frames_, bytes_, lag_steps)


def newest_chain(store: Names) -> Chain | None:
    """What leads to the newest durable step; None if no journal leads beyond the newest checkpoint."""
    chain = newest_end(store)
    return chain if chain is not None and chain.parts else None


def newest_end(store: Names) -> Chain | None:
    """The same, also if no journal has a step yet that leads beyond the checkpoint; None if none begins there.

    Looks again where a job removes one meanwhile, as it has a newer checkpoint.
    """
    for _ in range(_LOOKS - 1):
        try:
            return _newest_end(store)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
    return _newest_end(store)


def _newest_end(store: Names) -> Chain | None:
    committed = catalog.steps(store)
    if not committed:
        return None
    known = listed(store)
    for journal in known:
        chain = _chain_to(store, journal, known, committed)
        if chain is not None:
            return chain if chain.base >= committed[-1] else None
    return None


def _chain_to(store: Names, last: Journal, known: Sequence[Journal], committed: Sequence[int]) -> Chain | None:
    """The chain that ends with `last`; None if it leads to no committed checkpoint."""
    by_id = {one.opening.id: one for one in known}
    way = [last]
    while not _begins_at_checkpoint(store, way[-1].opening, committed):
        parent = by_id.get(way[-1].opening.parent or "")
        if parent is None or parent in way or parent.opening.number >= way[-1].opening.number:
            return None
        way.append(parent)
    parts = list[Part]()
    for at, journal in enumerate(reversed(way)):
        nearer = way[len(way) - 2 - at] if at + 1 < len(way) else None
        steps = [journal.opening.after, *common_steps(store, journal)]
        until = steps[-1] if nearer is None else nearer.opening.after
        if until not in steps:
            log.warning("%s/%s ends before step %d", store.location, journal.directory, until)
            return None
        if until > journal.opening.after:
            parts.append(Part(journal, until))
    return Chain(way[-1].opening.after, tuple(parts), last)


def _begins_at_checkpoint(store: Names, opening: Opening, committed: Sequence[int]) -> bool:
    if opening.checkpoint is None or opening.after not in committed:
        return False
    try:
        return read_manifest(store, step_directory(opening.after)).id == opening.checkpoint
    except NoCheckpointError:
        return False  # removed since, for a newer one
    except (FormatError, StorageError) as error:
        if isinstance(error, StorageError) and not is_damage(error):
            raise  # it is there, and cannot be read now: an older step must not pass for the newest
        return False  # nothing leads on from what cannot be loaded, and who loads it is told


def common_steps(store: Names, journal: Journal) -> list[int]:
    """The steps that the files of all ranks have, up to the first that one lacks."""
    of_all: list[list[int]] = []
    for rank in range(journal.opening.ranks):
        of_all.append([place.step for place in frames(store, journal, rank)])
        if not of_all[-1]:  # nor are the files of further ranks looked for, of which an opening may claim any number
            return []
    common = []
    for steps in zip(*of_all, strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    return common


def leads_to(store: Names, step: int | None) -> Chain | None:
    """What leads to `step`, or to the newest durable one; None if no journal has it."""
    chain = newest_chain(store)
    if chain is None or step is None:
        return chain
    inner = chain.up_to(step)
    return inner if inner.parts and inner.ends_at(store, step) else None


def newest_step(store: Names) -> int | None:
    """The newest durable step, in a journal or not; None in an empty store."""
    committed = catalog.steps(store)
    chain = newest_chain(store)
    return chain.newest if chain is not None else committed[-1] if committed else None


def next_number(store: Names) -> int:
    """A number above those of all journals."""
    return 1 + max((one.opening.number for one in listed(store)), default=0)


def cut(store: Store, step: int) -> None:
    """Make `step` the newest one of the journals. Needs the lock. Durable on return.

    Journals that begin later are set aside. A journal that leads further ends at `step` from now on: a new one begins
    there, and has no frames yet. Nothing of it is removed.
    """
    chain = newest_chain(store)
    if chain is not None and chain.base <= step < chain.newest:
        inner = chain.up_to(step)
        if inner.newest != step:
            raise AssertionError("the caller has checked that there is such a step")
        _begin_empty(store, chain, inner)
    for journal in listed(store):
        if journal.opening.after > step:
            removal.move(store, journal.directory, f"{new_superseded_directory(journal.opening.after)}.journal")
    sync(store)


def _begin_empty(store: Store, chain: Chain, inner: Chain) -> None:
    like = chain.parts[0].journal.opening
    base = read_manifest(store, step_directory(chain.base)).id
    parent = inner.parts[-1].journal.opening.id if inner.parts else None
    opening = msgspec.structs.replace(
        like, id=secrets.token_hex(8), number=next_number(store), after=inner.newest, rank=0, ranks=1,
        checkpoint=base if parent is None else None, parent=parent, owners=(),  # which name ranks that it does not have
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    directory = journal_directory(opening.after, opening.id)
    store.make_directory(directory)
    head = encode_head(OPENING, 0, opening.after, opening.id, opening, 0, opening.version)
    store.put(inside(directory, journal_file(0)), head)
    sync(store, directory)


def remove_older(
    store: Store, committed: int, on_removed: Callable[[str, str, StorageError | None], None],
    later: Callable[[Callable[[], None]], None] = removal.at_once,
) -> None:
    """Remove the journals that begin before `committed`, a checkpoint that is durable. Needs the lock.

    later  as of retention.prune
    """
    names = {
        name: entry.step for name in store.names()
        if (entry := parse(name)) is not None and entry.kind is Kind.JOURNAL and entry.step is not None
        and entry.step < committed
    }
    for name, step in sorted(names.items(), key=lambda one: one[1]):
        why = f"step {committed} is committed, and needs no journal from before it"
        try:
            if store.is_link(name) or files(store, name) is None:
                continue
            store.check_lock()
            deleting = new_deleting(step)
            store.rename(name, deleting.name)
            sync(store)
        except StorageError as error:
            on_removed(name, why, error)
        else:
            later(partial(retention.empty, store, deleting, name, why, on_removed))
