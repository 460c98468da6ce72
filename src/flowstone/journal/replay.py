"""THE ORDER of a replay: load a checkpoint, repeat the steps of the chain of journals after it, restore objects.

    frames --read ahead, verified--> optimizer steps --Replayer--> the state --fingerprint--> checked, step by step

On the caller's thread    `replay`: steps, fingerprints, objects
On `flowstone-replay`     reads and verifies the next frame (the record of one step), into the free one of two buffers;
                          also the frames in other ranks' files that have gradients for this rank
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from flowstone.commit.entries import journal_file
from flowstone.commit.manifests import path_inside
from flowstone.errors import DamagedError, MismatchError, ReplayError
from flowstone.format import objects
from flowstone.format.digest import digest
from flowstone.journal import journals
from flowstone.journal.fingerprints import window_of
from flowstone.journal.journal_format import (
    CompressedRow,
    JournalHeader,
    OptimizerRow,
    StepRow,
    TensorRow,
    decode_document,
)
from flowstone.journal.journal_frames import bytes_at
from flowstone.journal.journals import Chain, ChainPart, FramePlace
from flowstone.journal.optimizer_rows import optimizer_rows
from flowstone.journal.replayer import BorrowedGradients, Replayer
from flowstone.reading.checkpoint import Checkpoint
from flowstone.reading.compare import describe_stored
from flowstone.session.load_outcome import Replay
from flowstone.stage.bounce import fill_with
from flowstone.state import describe, prepare
from flowstone.store.appendable import AppendableStore
from flowstone.store.base import Store
from flowstone.torch.compressed import CompressedGradients, belongs_to, find_gradient_sources
from flowstone.torch.stepped_tensors import environment, find_replayable_optimizers

if TYPE_CHECKING:
    from flowstone.state import Restoration, StateDescription, StoredState


class UnfitError(Exception):
    """The journal does not fit the state: nothing was replayed."""


class ReplayPlan(msgspec.Struct, frozen=True, eq=False):
    """A chain of journals that a state's optimizers can replay.

    openings  for each part of the chain, the headers of this rank's file and of other files with gradients for this
              rank, by rank
    sources   the objects of the state that decompress gradients, by journal id
    """

    chain: Chain
    replayer: Replayer
    described: StateDescription
    openings: tuple[dict[int, JournalHeader], ...]
    sources: Mapping[str, Sequence[CompressedGradients]]
    rank: int


class VerifiedFrame(msgspec.Struct, frozen=True, eq=False):
    """The frame (record) of a step, whose bytes are intact. `borrowed`: see Replayer.apply."""

    opening: JournalHeader
    place: FramePlace
    row: StepRow
    payload: memoryview
    path: str
    borrowed: Sequence[BorrowedGradients] = ()


def plan_replay(store: Store, state: Mapping[str, object], chain: Chain, rank: int) -> ReplayPlan:
    """Prepare a replay of `chain`. Changes nothing.

    raises  UnfitError    the state's optimizers or layout differ from those in the journals
            DamagedError  the files of a journal contradict each other
    """
    described = describe(state, rank=rank)
    optimizers, why = find_replayable_optimizers(described.optimizers, described.unguarded)
    rows: tuple[OptimizerRow, ...] = ()
    if not why:
        rows, why = optimizer_rows(state, optimizers, rank)
    openings = []
    for part in () if why else chain.parts:
        own = journals.read_header(store, part.journal, rank)
        if own.optimizers != rows:
            why = "the journal's steps were made by other optimizers, or changed other parameters"
            break
        openings.append({peer: journals.read_header(store, part.journal, peer) for peer in (rank, *own.other_ranks)})
    if why:
        raise UnfitError(why)
    sources = sources_for(state, [by_rank[rank] for by_rank in openings])
    return ReplayPlan(chain, Replayer(optimizers), described, tuple(openings), sources, rank)


def count_readable(store: Store, fitted: ReplayPlan) -> int:
    """How many steps of the chain can be replayed: their frames are intact in all files that this rank needs. Reads
    these frames.
    """
    count = 0
    with suppress(DamagedError):
        for _ in _frames(store, fitted):
            count += 1
    return count


def replay(
    store: Store, checkpoint: Checkpoint, state: Mapping[str, object], fitted: ReplayPlan, *, fallback: bool
) -> tuple[Replay, Exception | None]:
    """Replay the journals of the chain in `state`, into which `checkpoint` was loaded. Blocks.

    returns  the report; and, if `fallback` is set, the error of a damaged frame that ended the replay early

    raises   ReplayError   a step is not bit-identical to the original
             DamagedError  the journal is damaged
    """
    started = monotonic()
    chain, rank = fitted.chain, fitted.rank
    if not chain.parts:
        return Replay(chain.base, 0, chain.newest, "exact", None, "", 0.0, 0), None
    opening = fitted.openings[0][rank]
    replayer, damage = fitted.replayer, None
    done = ReplayProgress(fitted.described, [by_rank[rank] for by_rank in fitted.openings], replayer)
    with replayer.stepping(opening.threads):
        try:
            for frame in _frames(store, fitted):
                done.begin_step(frame, state, rank)
                replayer.apply(frame.row, frame.payload, frame.path, frame.borrowed, fitted.sources[frame.opening.id])
                done.note_step(frame, state, rank)
        except DamagedError as error:
            if not fallback or done.row_begun(error):
                raise
            damage = error
    approximate = approximate_sections([by_rank[rank] for by_rank in fitted.openings])
    if done.steps:
        rest = {section: value for section, value in state.items() if section not in approximate}
        restore_remaining(checkpoint, rest, done, rank, approximate)
        update_sections(state, rest)
    outcome = Replay(
        chain.base, done.steps, chain.newest, done.exactness, done.differs_from, "" if damage is None else str(damage),
        monotonic() - started, done.bytes, approximate if done.steps else (),
    )
    return outcome, damage


def sources_for(state: Mapping[str, object], openings: Sequence[JournalHeader]) -> dict[str, list[CompressedGradients]]:
    """The objects of the state that decompress gradients, in the order of each journal's `sources`, by journal id.

    raises  UnfitError  the state lacks such an object
    """
    own = find_gradient_sources(state)
    sources: dict[str, list[CompressedGradients]] = {}
    for opening in openings:
        for row in opening.sources:
            source = own.get(row.section)
            if source is None or source.kind != row.kind:
                raise UnfitError(
                    f"the journal's gradients are compressed ({row.kind}), and '{row.section}' in the state cannot "
                    "decompress them: put the object that compressed them there",
                )
        sources[opening.id] = [own[row.section] for row in opening.sources]
    return sources


def approximate_sections(openings: Sequence[JournalHeader]) -> tuple[str, ...]:
    """The sections of the state whose tensors these journals do not log. `CompressedGradients.replayed` has
    approximated them.
    """
    rows = [row for opening in openings for row in opening.sources if not row.exact]
    return tuple(dict.fromkeys(row.section for row in rows))


class ReplayProgress:
    """The progress of a replay.

    values  newest values of tensors that no optimizer updates, by name
    replicated, per_rank  newest encoded objects by section: of sections that are equal on all ranks, and of the others
    strict  what happens if a fingerprint differs, although it should be equal. True: an error. False: `exactness`
            becomes "tolerance"
    """

    def __init__(
        self, described: StateDescription, openings: Sequence[JournalHeader], replayer: Replayer, *, strict: bool = True
    ) -> None:
        self._described, self._opening, self._replayer, self._strict = described, openings[0], replayer, strict
        # names that had fingerprints so far: their memory has the values of the replayed step
        self.proven = {*openings[0].proven}
        self._addresses: list[int] = []  # addresses of the memory that steps change, when the state was last described
        self.steps, self.bytes, self.step = 0, 0, openings[0].after
        self.differs_from: int | None = None
        is_alike = all(_is_of_this_environment(opening, described.places.devices) for opening in openings)
        self.exactness = "exact" if is_alike else "tolerance"
        self.values: dict[str, tuple[TensorRow, bytes]] = {}
        self.replicated: dict[str, bytes] = {}
        self.per_rank: dict[str, bytes] = {}

    def row_begun(self, error: DamagedError) -> bool:
        """Whether the damage was found in the middle of a step, so that the state belongs to no step."""
        return "does not fit" in error.message

    def begin_step(self, frame: VerifiedFrame, state: Mapping[str, object], rank: int) -> None:
        """Call this before a step. At a journal's first step, copies to the state the values that the journal does not
        log.
        """
        if frame.opening is self._opening:
            return
        self._opening = frame.opening
        if not _is_of_this_environment(frame.opening, self._described.places.devices):
            self.exactness = "tolerance"
        self.proven |= {*frame.opening.proven}
        waiting = self.values.keys() & {*frame.opening.proven}
        if not waiting:
            return
        described = describe(state, rank=rank)
        lengths, places = described.pieces.lengths().tolist(), described.places
        for index, name in enumerate(described.pieces.names):
            if name not in waiting:
                continue
            content = self.values[name][1]
            if len(content) == lengths[index]:
                fill_with(places.memory(index, described.pieces[index]), content)
                del self.values[name]
                waiting.remove(name)

    def note_step(self, frame: VerifiedFrame, state: Mapping[str, object], rank: int) -> None:
        """Call this after a step. Checks the step's fingerprint, and keeps its values and objects."""
        row, payload = frame.row, frame.payload
        self._prove(frame, state, rank)
        for name, index in row.values.items():
            tensor = row.tensors[index]
            self.values[name] = tensor, bytes(payload[tensor.offset : tensor.offset + tensor.bytes])
        for newest, texts in ((self.replicated, row.replicated), (self.per_rank, row.per_rank)):
            for section, index in texts.items():
                tensor = row.tensors[index]
                newest[section] = bytes(payload[tensor.offset : tensor.offset + tensor.bytes])
        self.steps, self.step = self.steps + 1, frame.place.step
        self.bytes += frame.place.frame.frame_bytes

    def _prove(self, frame: VerifiedFrame, state: Mapping[str, object], rank: int) -> None:
        """Compare the fingerprint of the step's window (a part of the state) with the one in the journal."""
        opening, row = frame.opening, frame.row
        if row.window is None or row.window >= opening.windows:
            if opening.has_chunk_fingerprints:  # the device could not compute the digests
                self.exactness = "tolerance"
            return
        addresses = self._replayer.addresses()
        if addresses != self._addresses:  # a step may create optimizer state
            self._described, self._addresses = describe(state, rank=rank), addresses
        pieces, places = self._described.pieces, self._described.places
        rows = {name: index for index, name in enumerate(pieces.names)}
        if any(name not in rows or rows[name] in places.strided for name in opening.proven):
            raise ReplayError(
                f"step {frame.place.step} was replayed, but cannot be checked",
                journal=frame.path, found="the journal names tensors that the state does not have",
                next=f"call load(step={opening.after})",
            )
        proven = np.array([rows[name] for name in opening.proven], np.int64)
        window = window_of(
            row.window, opening.windows, places, proven, pieces.lengths()[proven], state,
            by_chunks=opening.has_chunk_fingerprints
        )
        if window is None:  # a device cannot compute these digests
            self.exactness = "tolerance"
            return
        if window.fingerprint() == row.fingerprint:
            return
        # on a device, replays need not be bit-identical
        if self.exactness == "exact" and self._strict and not opening.has_chunk_fingerprints:
            raise ReplayError(
                f"step {frame.place.step} could not be replayed bit for bit",
                journal=frame.path,
                found="the state differs from that in training; with the same torch and processor it should be equal",
                next=f"call load(step={opening.after}), or load an older checkpoint",
            )
        self.exactness = "tolerance"
        self.differs_from = frame.place.step if self.differs_from is None else self.differs_from


def _is_of_this_environment(opening: JournalHeader, devices: Sequence[str]) -> bool:
    """Whether this machine and software should repeat the steps of that journal bit for bit. `devices`: the state's
    devices.
    """
    here, expected = environment(devices), "proven" if devices else "exact"
    return (opening.torch, opening.processor, opening.exactness) == (here.torch, here.processor, expected)


def _frames(store: Store, fitted: ReplayPlan) -> Iterator[VerifiedFrame]:
    """The frames of a chain, verified; the next frame is read while the caller uses one.

    raises  DamagedError at a damaged frame
    """
    chain, ranks = fitted.chain, {fitted.rank, *(rank for openings in fitted.openings for rank in openings)}
    numbers = {part.journal.directory: index for index, part in enumerate(chain.parts)}
    places = {rank: list(chain.steps(store, rank)) for rank in ranks}
    count = len(places[fitted.rank])
    buffers = [{rank: FrameBuffer() for rank in ranks} for _ in range(2)]

    def read(number: int) -> VerifiedFrame:
        part, place = places[fitted.rank][number]
        openings, frames = fitted.openings[numbers[part.journal.directory]], dict[int, VerifiedFrame]()
        for rank, opening in openings.items():
            theirs = places[rank][number][1] if number < len(places[rank]) else None
            if theirs is None or theirs.step != place.step:
                raise _damaged(store, part, rank, place.step, "the whole file")
            frames[rank] = read_frame(store, part, theirs, opening, buffers[number % 2][rank])
        return with_borrowed_gradients(frames, fitted.rank)

    with ThreadPoolExecutor(1, thread_name_prefix="flowstone-replay") as ahead:
        next_frame = ahead.submit(read, 0) if count else None
        for number in range(count):
            assert next_frame is not None, "there is one for each place"
            frame = next_frame.result()
            next_frame = ahead.submit(read, number + 1) if number + 1 < count else None
            yield frame


def with_borrowed_gradients(frames: Mapping[int, VerifiedFrame], rank: int) -> VerifiedFrame:
    """A rank's frame, with gradients of its parameters that other ranks have logged."""
    own = frames[rank]
    if len(frames) == 1:
        return own
    gradients: list[dict[int, tuple[TensorRow, memoryview]]] = [{} for _ in own.row.acts]
    buckets: list[list[tuple[CompressedRow, Sequence[TensorRow], memoryview]]] = [[] for _ in own.row.acts]
    for owner, frame in frames.items():
        for act_number, (act, theirs) in enumerate(zip(own.row.acts, frame.row.acts, strict=False)):
            if owner == rank or act.optimizer != theirs.optimizer or act.optimizer >= len(own.opening.optimizers):
                continue
            positions = _positions(own.opening, act.optimizer, owner)
            names = _names(frame.opening, act.optimizer)
            for index, number in theirs.gradients:
                if index < len(names) and names[index] in positions:
                    gradients[act_number][positions[names[index]]] = frame.row.tensors[number], frame.payload
            for row in theirs.compressed:
                first = row.parameters[0][0] if row.parameters else len(names)
                if first < len(names) and names[first] in positions:
                    bucket = _with_own_numbers(row, frame.opening, own.opening, act.optimizer)
                    buckets[act_number].append((bucket, frame.row.tensors, frame.payload))
    return msgspec.structs.replace(own, borrowed=list(map(BorrowedGradients, gradients, buckets)))


def _with_own_numbers(row: CompressedRow, theirs: JournalHeader, own: JournalHeader, optimizer: int) -> CompressedRow:
    """A bucket from another rank's file, in which sources and parameters are numbered as on this rank. A source or
    parameter that this rank lacks gets a number that is too large to be valid.
    """
    numbers = {name: index for index, name in enumerate(_names(own, optimizer))}
    names, absent = _names(theirs, optimizer), len(numbers)
    sections = [source_row.section for source_row in own.sources]
    section = theirs.sources[row.source].section if row.source < len(theirs.sources) else ""
    members = [
        (numbers.get(names[index], absent) if index < len(names) else absent, offset)
        for index, offset in row.parameters
    ]
    source = sections.index(section) if section in sections else len(sections)
    return msgspec.structs.replace(row, source=source, parameters=tuple(members))


def _names(opening: JournalHeader, optimizer: int) -> list[str]:
    rows = opening.optimizers
    return [name for group in rows[optimizer].groups for name in group] if optimizer < len(rows) else []


def _positions(opening: JournalHeader, optimizer: int, owner: int) -> dict[str, int]:
    """The optimizer's parameters whose gradients are in the file of rank `owner`: name -> position."""
    return {
        name: index
        for index, (name, rank) in enumerate(zip(_names(opening, optimizer), opening.owners[optimizer], strict=True))
        if rank == owner
    }


class FrameBuffer:
    """Reused memory for one frame."""

    def __init__(self) -> None:
        self._pages = mmap.mmap(-1, 4096)

    def pages(self, length: int) -> memoryview:
        if len(self._pages) < length:
            self._pages = mmap.mmap(-1, length)
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(self._pages)[:length]


def read_frame(
    store: Store, part: ChainPart, place: FramePlace, opening: JournalHeader, buffer: FrameBuffer
) -> VerifiedFrame:
    path = path_inside(part.journal.directory, journal_file(opening.rank))
    shown = f"{store.location}/{path}"
    frame = place.frame
    data = buffer.pages(frame.frame_bytes)  # the file is long enough: `journals.complete_frames` checks that
    read_bytes = cast("AppendableStore", store).read_into(path, place.offset, data)
    row = decode_document(data, frame, StepRow, path=shown) if read_bytes >= frame.frame_bytes else None
    payload = data[frame.payload_offset :]
    if row is None or any(digest(payload[t.offset : t.offset + t.bytes]) != t.digest for t in row.tensors):
        where = f"bytes {place.offset}..{place.offset + frame.frame_bytes}"
        raise _damaged(store, part, opening.rank, place.step, where)
    return VerifiedFrame(opening, place, row, payload, shown)


def _damaged(store: Store, part: ChainPart, rank: int, step: int, where: str) -> DamagedError:
    path = f"{store.location}/{path_inside(part.journal.directory, journal_file(rank))}"
    return DamagedError(
        f"{path} is damaged: the frame of step {step} does not match its checksum",
        range=where,
        next="call load(fallback=True) to load the step before the damaged one, or "
        f"load(step={part.journal.header.after})",
    )


def restore_remaining(
    checkpoint: Checkpoint, state: Mapping[str, object], done: ReplayProgress, rank: int, left_out: Sequence[str]
) -> None:
    """Restore what optimizer steps do not compute: objects, generators, and the tensors that no optimizer updates.

    left_out  sections of the checkpoint that `state` lacks
    """
    stored = describe_stored(checkpoint, rank)
    try:
        replicated = {name: objects.decode_text(text, name) for name, text in done.replicated.items()}
        per_rank = {name: objects.decode_text(text, name) for name, text in done.per_rank.items()}
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise DamagedError(
            f"the objects of step {done.step} are not valid: {error!s:.300}",
            next="call load(step=...) with the step of the full checkpoint that precedes the journal"
        ) from error
    stored = msgspec.structs.replace(
        stored,
        objects={name: value for name, value in {**stored.objects, **replicated}.items() if name not in left_out},
        per_rank={name: value for name, value in {**stored.per_rank, **per_rank}.items() if name not in left_out},
        equal=partial(_equal_now, stored, done.values),
    )
    restoration = prepare(state, stored, rank=rank)
    for alias in restoration.aliases:
        if not stored.equal(alias.name, alias.target):
            raise MismatchError(
                f"'{alias.name}' shares memory with '{alias.target}', and their values at step {done.step} differ",
                next=f"give '{alias.name}' its own memory (clone()), and load again",
            )
    for difference in restoration.differences:
        if belongs_to(difference.name, left_out):
            continue
        raise DamagedError(
            f"'{difference.name}' in the journal does not fit the state", expected=difference.expected,
            found=difference.stored,
            next="call load(step=...) with the step of the full checkpoint that precedes the journal",
        )
    _fill(restoration, describe(state, rank=rank), done, checkpoint)
    restoration.finish()


def _equal_now(stored: StoredState, values: Mapping[str, tuple[TensorRow, bytes]], first: str, second: str) -> bool:
    """Whether two tensors have equal values at the replayed step. Also True if one of them is not stored."""
    if first not in stored.tensors or second not in stored.tensors:
        return True
    if stored.tied.get(first, first) == stored.tied.get(second, second):
        return True
    first_value, second_value = values.get(first), values.get(second)
    if first_value is None and second_value is None:
        return stored.equal(first, second)
    return first_value is not None and second_value is not None and first_value[1] == second_value[1]


def update_sections(state: Mapping[str, object], restored: Mapping[str, object]) -> None:
    """Set sections of the caller's state whose values cannot change in place, such as numbers."""
    for section, value in restored.items():
        if state[section] is not value:
            cast("MutableMapping[str, object]", state)[section] = value


def _fill(restoration: Restoration, live: StateDescription, done: ReplayProgress, checkpoint: Checkpoint) -> None:
    """Copy the newest values of tensors to restored memory that lacks them. `live`: the state after the steps.

    Some tensors of an optimizer, such as tensors in a list, are restored into new memory. The results of the
    optimizer's steps are copied there.
    """
    pieces, places, lengths = restoration.pieces, restoration.places, restoration.pieces.lengths().tolist()
    live_addresses, live_lengths = {*live.places.address.tolist()}, live.pieces.lengths().tolist()
    made: dict[str, list[int]] = {}
    live_plain = live.places.host_runs
    for index, name in enumerate(live.pieces.names):
        if name in done.proven and live_plain[index]:
            made.setdefault(name, []).append(index)
    for index, piece in enumerate(pieces):
        address, logged, content = int(places.address[index]), done.values.get(piece.name), None
        if logged is not None:
            content = logged[1]
        elif address in live_addresses or not lengths[index]:
            continue
        elif piece.name in done.proven:
            for row in made.get(piece.name, ()):
                if live.pieces.box(row) == piece.box:
                    content = bytes(bytes_at(int(live.places.address[row]), live_lengths[row]))
        else:  # the tensor is unchanged since the checkpoint, and was restored into new memory
            content = checkpoint.read(piece.name, piece.box, framework="numpy").tobytes()
        if content is None or len(content) != lengths[index]:
            raise DamagedError(
                f"'{piece.name}' in the journal does not fit the state",
                next="call load(step=...) with the step of the full checkpoint that precedes the journal"
            )
        fill_with(places.memory(index, piece), content)
