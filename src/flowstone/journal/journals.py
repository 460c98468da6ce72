"""The journals of a store: lists them, finds the journals that lead to a step (a chain), and cuts and removes journals
(docs/FORMAT.md, Journal).

Needs no torch. Imported only if a store has a journal, or one will be written.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial

import msgspec

from flowstone.commit import catalog, removal, retention
from flowstone.commit.entries import (
    EntryKind,
    is_journal_file,
    journal_directory,
    journal_file,
    new_deleting,
    new_superseded_directory,
    parse_entry,
    step_directory,
)
from flowstone.commit.manifests import path_inside, read_manifest
from flowstone.config import BLOCK_BYTES
from flowstone.errors import DamagedError, FormatError, NoCheckpointError, StorageError, is_damage
from flowstone.format.digest import digest
from flowstone.format.manifest import Manifest
from flowstone.journal.journal_format import (
    HEADER,
    STEP,
    FramePrefix,
    JournalHeader,
    StepRow,
    decode_document,
    decode_prefix,
    encode_frame_head,
)
from flowstone.log import log
from flowstone.store.base import Names, Store, sync_names

_READS_MAX = 5  # limit of attempts to list the journals, if a job removes some meanwhile


class FramePlace(msgspec.Struct, frozen=True):
    """The frame of a step, and its offset in the journal's file."""

    step: int
    offset: int
    frame: FramePrefix


class Journal(msgspec.Struct, frozen=True):
    """A journal that can be opened, with the header of its first file."""

    directory: str
    header: JournalHeader


class ChainPart(msgspec.Struct, frozen=True):
    """The steps that a chain takes from one journal: those after step `journal.header.after`, up to step `until`."""

    journal: Journal
    until: int


class Chain(msgspec.Struct, frozen=True):
    """The journals that lead from a committed checkpoint to the newest durable step.

    parts  in order; `until` of the last part is that step
    end    the last journal, if the chain reaches its end; it may have no steps. None: the chain is cut before that
    """

    base: int
    parts: tuple[ChainPart, ...]
    end: Journal | None = None

    @property
    def newest(self) -> int:
        return self.parts[-1].until if self.parts else self.base

    def steps(self, store: Names, rank: int) -> Iterator[tuple[ChainPart, FramePlace]]:
        """The frames of all steps of the chain, in order, in the files of one rank."""
        for part in self.parts:
            for place in complete_frames(store, part.journal, rank):
                if place.step <= part.until:
                    yield part, place

    def ends_at(self, store: Names, step: int) -> bool:
        """Whether the last journal has a frame of `step`."""
        return any(place.step == step for place in complete_frames(store, self.parts[-1].journal, 0))

    def up_to(self, step: int) -> Chain:
        """This chain without the steps after `step`."""
        parts = [part for part in self.parts if part.journal.header.after < step]
        cut = [msgspec.structs.replace(part, until=min(part.until, step)) for part in parts]
        return Chain(self.base, tuple(cut))


def list_journals(store: Names) -> list[Journal]:
    """All journals that can be opened, newest first. Journals that cannot be opened are skipped, since a crash may have
    left them.
    """
    journals = []
    for name in store.names():
        entry = parse_entry(name)
        if entry is None or entry.kind is not EntryKind.JOURNAL or store.is_link(name):
            continue
        for file in journal_files(store, name) or ():
            opening = _opening(store, name, file)
            if opening is not None and journal_directory(opening.after, opening.id) == name:
                journals.append(Journal(name, opening))
                break
    return sorted(journals, key=lambda journal: journal.header.number, reverse=True)


def journal_files(store: Names, directory: str) -> tuple[str, ...] | None:
    """The names of the files in a journal's directory. None if that path is a file of another program, or was removed
    meanwhile.
    """
    try:
        return store.names(directory)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None


def _opening(store: Names, directory: str, file: str) -> JournalHeader | None:
    """The header in a journal's file. None if it was written only in part, or the file is not a journal."""
    path = path_inside(directory, file)
    if not is_journal_file(file):
        return None
    try:
        frame = _frame_at(store, path, 0)
        if frame is None or frame.kind != HEADER:
            return None
        data = store.read(path, length=frame.payload_offset)
        return decode_document(data, frame, JournalHeader, path=f"{store.location}/{path}")
    except (FormatError, StorageError) as error:
        if isinstance(error, StorageError) and error.errno == errno.ENOENT:
            return None  # the directory was removed after it was listed, because there is a newer checkpoint
        log.warning("the journal %s/%s cannot be opened: %s", store.location, path, error)
        return None


def read_header(store: Names, journal: Journal, rank: int) -> JournalHeader:
    """The header of a rank's file. Raises DamagedError if it does not belong to that journal."""
    if journal.header.rank == rank:
        return journal.header
    file = journal_file(rank)
    opening = _opening(store, journal.directory, file)
    if opening is None or _common(opening) != _common(journal.header) or opening.rank != rank:
        raise DamagedError(
            f"{store.location}/{path_inside(journal.directory, file)} is damaged: its header does not match the "
            "headers of the journal's other files",
            next=f"call load(step={journal.header.after}), or load an older checkpoint",
        )
    return opening


def _common(opening: JournalHeader) -> tuple[object, ...]:
    """The fields that are equal in the files of all ranks."""
    begins = opening.after, opening.checkpoint, opening.parent
    return opening.id, opening.number, *begins, opening.ranks, opening.torn_max


def _frame_at(store: Names, path: str, offset: int) -> FramePrefix | None:
    return decode_prefix(store.read(path, offset=offset, length=BLOCK_BYTES))


def complete_frames(store: Names, journal: Journal, rank: int) -> list[FramePlace]:
    """A rank's complete frames, up to the first incomplete one.

    Frame N is written only once frame N - `torn_max` is durable. So a crash can leave only the last `torn_max` frames
    incomplete, and only the payloads of these frames are read.
    """
    path = path_inside(journal.directory, journal_file(rank))
    if not store.exists(path):
        return []
    size, places = store.size(path), list[FramePlace]()
    frame = _frame_at(store, path, 0)
    if frame is None or frame.journal != journal.header.id or frame.kind != HEADER:
        return []
    place = FramePlace(frame.step, 0, frame)
    while (after := _frame_after(store, path, size, place)) is not None:
        place = after
        places.append(place)
    for index in range(max(len(places) - journal.header.torn_max, 0), len(places)):
        if not is_complete(store, path, places[index]):
            return places[:index]
    return places


def next_frame(store: Names, journal: Journal, rank: int, last: FramePlace | None) -> FramePlace | None:
    """The frame after `last` (None: after the header), if its prefix has been written. Does not check the frame's
    payload.
    """
    path = path_inside(journal.directory, journal_file(rank))
    if last is None:
        frame = _frame_at(store, path, 0)
        if frame is None or frame.journal != journal.header.id or frame.kind != HEADER:
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


def is_complete(store: Names, path: str, place: FramePlace) -> bool:
    """Whether a frame is complete, that is, its document and its tensors match their digests. Raises DamagedError if
    the document is inconsistent.
    """
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


class JournalComposition(msgspec.Struct, frozen=True):
    """What a journal contains.

    ranks        how many ranks write it, each to its own file
    first, last  the first and last step that is in every rank's file; None: there is no such step yet
    frames       number of complete frames of steps, added up over the files of all ranks
    bytes        length of these frames and of the headers; files may be longer, as space is reserved for later frames
    lag_steps    the option `lag_steps` of the job that wrote the journal
    """

    name: str
    ranks: int
    first: int | None
    last: int | None
    frames: int
    bytes: int
    lag_steps: int


def journals_after(store: Names, manifest: Manifest) -> tuple[JournalComposition, ...]:
    """The journals that begin at the checkpoint of `manifest`, and those that continue these journals, the oldest
    first.
    """
    ids: set[str] = set()
    makeups = []
    for journal in reversed(list_journals(store)):
        opening = journal.header
        begins = opening.after == manifest.step and opening.checkpoint == manifest.id
        if begins or opening.parent in ids:
            ids.add(opening.id)
            makeups.append(_makeup(store, journal))
    return tuple(makeups)


def _makeup(store: Names, journal: Journal) -> JournalComposition:
    frames_, bytes_ = 0, 0
    for file in store.names(journal.directory):
        if is_journal_file(file):
            opening = _frame_at(store, path_inside(journal.directory, file), 0)
            places = complete_frames(store, journal, int(file[len("rank-") : -len(".journal")]))
            frames_ += len(places)
            bytes_ += sum(place.frame.frame_bytes for place in places) + (0 if opening is None else opening.frame_bytes)
    steps = common_steps(store, journal)
    first, last = (steps[0], steps[-1]) if steps else (None, None)
    lag_steps = journal.header.torn_max
    return JournalComposition(journal.directory, journal.header.ranks, first, last, frames_, bytes_, lag_steps)


def newest_chain(store: Names) -> Chain | None:
    """The chain to the newest durable step; None if no journal leads beyond the newest checkpoint."""
    chain = newest_chain_or_empty(store)
    return chain if chain is not None and chain.parts else None


def newest_chain_or_empty(store: Names) -> Chain | None:
    """Like `newest_chain`, but a chain may consist of journals without steps. None if no journal begins at the newest
    checkpoint.

    Searches again if a job with a newer checkpoint removes a journal meanwhile.
    """
    for _ in range(_READS_MAX - 1):
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
    journals = list_journals(store)
    for journal in journals:
        chain = _chain_to(store, journal, journals, committed)
        if chain is not None:
            return chain if chain.base >= committed[-1] else None
    return None


def _chain_to(store: Names, last: Journal, journals: Sequence[Journal], committed: Sequence[int]) -> Chain | None:
    """The chain that ends with `last`; None if it leads to no committed checkpoint."""
    by_id = {journal.header.id: journal for journal in journals}
    newest_first = [last]
    while not _begins_at_checkpoint(store, newest_first[-1].header, committed):
        parent = by_id.get(newest_first[-1].header.parent or "")
        if parent is None or parent in newest_first or parent.header.number >= newest_first[-1].header.number:
            return None
        newest_first.append(parent)
    parts = list[ChainPart]()
    for index, journal in enumerate(reversed(newest_first)):
        nearer = newest_first[len(newest_first) - 2 - index] if index + 1 < len(newest_first) else None
        steps = [journal.header.after, *common_steps(store, journal)]
        until = steps[-1] if nearer is None else nearer.header.after
        if until not in steps:
            log.warning("%s/%s ends before step %d", store.location, journal.directory, until)
            return None
        if until > journal.header.after:
            parts.append(ChainPart(journal, until))
    return Chain(newest_first[-1].header.after, tuple(parts), last)


def _begins_at_checkpoint(store: Names, opening: JournalHeader, committed: Sequence[int]) -> bool:
    if opening.checkpoint is None or opening.after not in committed:
        return False
    try:
        return read_manifest(store, step_directory(opening.after)).id == opening.checkpoint
    except NoCheckpointError:
        return False  # the checkpoint was removed meanwhile, as there is a newer one
    except (FormatError, StorageError) as error:
        if isinstance(error, StorageError) and not is_damage(error):
            raise  # the file exists but cannot be read now: an older step must not be taken for the newest
        return False  # a damaged checkpoint has no chain, and loading it raises an error


def common_steps(store: Names, journal: Journal) -> list[int]:
    """The steps that the files of all ranks have, up to the first step that a file lacks."""
    of_all: list[list[int]] = []
    for rank in range(journal.header.ranks):
        of_all.append([place.step for place in complete_frames(store, journal, rank)])
        if not of_all[-1]:  # stop here: a damaged header may claim any number of ranks
            return []
    common = []
    for steps in zip(*of_all, strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    return common


def journal_chain(store: Names, step: int | None) -> Chain | None:
    """The journals that must be replayed to reach `step` (None: the newest durable step). None if no replay is needed
    or no journal has that step.
    """
    chain = newest_chain(store)
    if chain is None or step is None:
        return chain
    inner = chain.up_to(step)
    return inner if inner.parts and inner.ends_at(store, step) else None


def newest_step(store: Names) -> int | None:
    """The newest durable step, whether a checkpoint or a journal has it. None in an empty store."""
    committed = catalog.steps(store)
    chain = newest_chain(store)
    return chain.newest if chain is not None else committed[-1] if committed else None


def next_journal_number(store: Names) -> int:
    """A number above those of all journals."""
    return 1 + max((journal.header.number for journal in list_journals(store)), default=0)


def cut_journals(store: Store, step: int) -> None:
    """Make `step` the newest step of the journals. The caller must hold the store's lock. The change is durable on
    return.

    Journals that begin later are set aside. If a journal has steps after `step`, a new journal without frames begins at
    `step`, so that the later frames no longer count. Nothing is removed.
    """
    chain = newest_chain(store)
    if chain is not None and chain.base <= step < chain.newest:
        inner = chain.up_to(step)
        if inner.newest != step:
            raise AssertionError(f"step {step} does not exist, although the caller has checked it")
        _begin_empty(store, chain, inner)
    for journal in list_journals(store):
        if journal.header.after > step:
            removal.move_directory(
                store, journal.directory, f"{new_superseded_directory(journal.header.after)}.journal"
            )
    sync_names(store)


def _begin_empty(store: Store, chain: Chain, inner: Chain) -> None:
    like = chain.parts[0].journal.header
    base = read_manifest(store, step_directory(chain.base)).id
    parent = inner.parts[-1].journal.header.id if inner.parts else None
    opening = msgspec.structs.replace(
        like, id=secrets.token_hex(8), number=next_journal_number(store), after=inner.newest, rank=0, ranks=1,
        checkpoint=base if parent is None else None, parent=parent, owners=(),  # owners name ranks of the old journal
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    directory = journal_directory(opening.after, opening.id)
    store.make_directory(directory)
    head = encode_frame_head(HEADER, 0, opening.after, opening.id, opening, 0, opening.version)
    store.put(path_inside(directory, journal_file(0)), head)
    sync_names(store, directory)


def remove_older_journals(
    store: Store, committed: int, on_removed: Callable[[str, str, StorageError | None], None],
    run_later: Callable[[Callable[[], None]], None] = removal.run_now,
) -> None:
    """Remove the journals that begin before `committed`, the step of a durable checkpoint. The caller must hold the
    store's lock.

    run_later  see retention.remove_expired
    """
    names = {
        name: entry.step for name in store.names()
        if (entry := parse_entry(name)) is not None and entry.kind is EntryKind.JOURNAL and entry.step is not None
        and entry.step < committed
    }
    for name, step in sorted(names.items(), key=lambda item: item[1]):
        why = f"step {committed} is committed, so older journals are not needed"
        try:
            if store.is_link(name) or journal_files(store, name) is None:
                continue
            store.check_lock()
            deleting = new_deleting(step)
            store.rename(name, deleting.name)
            sync_names(store)
        except StorageError as error:
            on_removed(name, why, error)
        else:
            run_later(partial(retention.empty_retired, store, deleting, name, why, on_removed))
