"""THE ORDER of a replay: a checkpoint is loaded; then the steps of a journal are made again; then objects are restored.

    frames --read ahead, verified--> acts --Replayer--> the state --fingerprint--> proven, step by step

On the caller's thread    `replay`: steps, fingerprints, objects
On `flowstone-replay`     reads the next frame into the other of two buffers, and verifies it; and those of other ranks
                          that have gradients for this one
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

from flowstone.checkpoint import Checkpoint
from flowstone.commit import journals
from flowstone.commit.entries import journal_file
from flowstone.commit.journals import Chain, FramePlace, Part
from flowstone.commit.manifests import inside
from flowstone.errors import DamagedError, MismatchError, ReplayError
from flowstone.format import objects
from flowstone.format.digest import digest
from flowstone.format.journal import CompressedRow, Opening, OptimizerRow, StepRow, TensorRow, decode_document
from flowstone.pipeline.compare import stored_of
from flowstone.pipeline.load_outcome import Replay
from flowstone.stage.bounce import fill_with
from flowstone.stage.fingerprints import window_of
from flowstone.stage.journal_frames import bytes_at
from flowstone.stage.replayer import Borrowed, Replayer
from flowstone.state import describe, prepare
from flowstone.state.compressed import CompressedGradients, is_of, sources_of
from flowstone.state.stepped import environment, optimizer_rows, replayable
from flowstone.store.appends import Appends
from flowstone.store.base import Store

if TYPE_CHECKING:
    from flowstone.state import Described, Restoration, Stored


class UnfitError(Exception):
    """The journal is of another layout: nothing was replayed."""


class Fitted(msgspec.Struct, frozen=True, eq=False):
    """A chain that a state's optimizers can replay.

    openings  for each part of the chain, by rank: of this rank's file, and of those that have gradients for it
    sources   of compressed gradients, by the identity of a journal
    """

    chain: Chain
    replayer: Replayer
    described: Described
    openings: tuple[dict[int, Opening], ...]
    sources: Mapping[str, Sequence[CompressedGradients]]
    rank: int


class ReadFrame(msgspec.Struct, frozen=True, eq=False):
    """A frame. `borrowed`: see Replayer.apply."""

    opening: Opening
    place: FramePlace
    row: StepRow
    payload: memoryview
    path: str
    borrowed: Sequence[Borrowed] = ()


def fit(store: Store, state: Mapping[str, object], chain: Chain, rank: int) -> Fitted:
    """What a replay of `chain` needs. Changes nothing.

    raises  UnfitError    optimizers or layout are not those of the journals
            DamagedError  the files of a journal contradict each other
    """
    described = describe(state, rank=rank)
    optimizers, why = replayable(described.optimizers, described.unguarded)
    rows: tuple[OptimizerRow, ...] = ()
    if not why:
        rows, why = optimizer_rows(state, optimizers, rank)
    openings = []
    for part in () if why else chain.parts:
        own = journals.opening_of(store, part.journal, rank)
        if own.optimizers != rows:
            why = "its steps are of other optimizers, or of other parameters"
            break
        openings.append({one: journals.opening_of(store, part.journal, one) for one in (rank, *own.others)})
    if why:
        raise UnfitError(why)
    sources = sources_for(state, [one[rank] for one in openings])
    return Fitted(chain, Replayer(optimizers), described, tuple(openings), sources, rank)


def count_readable(store: Store, fitted: Fitted) -> int:
    """How many steps of the chain have whole frames in all files that this rank needs. Reads all of them."""
    count = 0
    with suppress(DamagedError):
        for _ in _frames(store, fitted):
            count += 1
    return count


def replay(
    store: Store, checkpoint: Checkpoint, state: Mapping[str, object], fitted: Fitted, *, fallback: bool
) -> tuple[Replay, Exception | None]:
    """Bring `state`, which is that of `checkpoint`, to the end of the chain. Blocks.

    returns  what was done; and the damage that ended it early, where `fallback` allows that

    raises   ReplayError   a step is not bit for bit what it was
             DamagedError  the journal's bytes are not what was written
    """
    started = monotonic()
    chain, rank = fitted.chain, fitted.rank
    if not chain.parts:
        return Replay(chain.base, 0, chain.newest, "exact", None, "", 0.0, 0), None
    opening = fitted.openings[0][rank]
    replayer, damage = fitted.replayer, None
    done = Progress(fitted.described, [one[rank] for one in fitted.openings], replayer)
    with replayer.stepping(opening.threads):
        try:
            for one in _frames(store, fitted):
                replayer.sources = fitted.sources[one.opening.id]
                done.begin(one, state, rank)
                replayer.apply(one.row, one.payload, one.path, one.borrowed)
                done.note(one, state, rank)
        except DamagedError as error:
            if not fallback or done.row_begun(error):
                raise
            damage = error
    approximate = approximate_sections([one[rank] for one in fitted.openings])
    if done.steps:
        rest = {section: value for section, value in state.items() if section not in approximate}
        restore_rest(checkpoint, rest, done, rank, approximate)
        take_over(state, rest)
    found = Replay(
        chain.base, done.steps, chain.newest, done.exactness, done.differs_from, "" if damage is None else str(damage),
        monotonic() - started, done.bytes, approximate if done.steps else (),
    )
    return found, damage


def sources_for(state: Mapping[str, object], openings: Sequence[Opening]) -> dict[str, list[CompressedGradients]]:
    """What decompresses gradients, for each journal.

    raises  UnfitError if the state does not have it
    """
    here = sources_of(state)
    found: dict[str, list[CompressedGradients]] = {}
    for opening in openings:
        for row in opening.sources:
            own = here.get(row.section)
            if own is None or own.kind != row.kind:
                raise UnfitError(
                    f"its gradients are compressed ({row.kind}), and '{row.section}' of the state is nothing that "
                    "decompresses them"
                )
        found[opening.id] = [here[row.section] for row in opening.sources]
    return found


def approximate_sections(openings: Sequence[Opening]) -> tuple[str, ...]:
    """Sections whose tensors no journal has: `CompressedGradients.replayed` has brought them near to what they were."""
    rows = [row for opening in openings for row in opening.sources if not row.exact]
    return tuple(dict.fromkeys(row.section for row in rows))


class Progress:
    """What a replay has come to. `values`, `texts`: the newest of what no optimizer explains.

    strict  a step that is not what it was, where it should be, is an error; else the class becomes "tolerance"
    """

    def __init__(
        self, described: Described, openings: Sequence[Opening], replayer: Replayer, *, strict: bool = True
    ) -> None:
        self._described, self._opening, self._replayer, self._strict = described, openings[0], replayer, strict
        self.proven = {*openings[0].proven}  # by fingerprints of any journal so far: it is in its place
        self._addresses: list[int] = []  # of what was described, as far as steps change it
        self.steps, self.bytes, self.step = 0, 0, openings[0].after
        self.differs_from: int | None = None
        is_alike = all(_is_of_this_environment(one, described.places.devices) for one in openings)
        self.exactness = "exact" if is_alike else "tolerance"
        self.values: dict[str, tuple[TensorRow, bytes]] = {}
        self.replicated: dict[str, bytes] = {}
        self.per_rank: dict[str, bytes] = {}

    def row_begun(self, error: DamagedError) -> bool:
        """Whether the damage was found in the middle of a step, so that the state is of none."""
        return "does not fit" in error.message

    def begin(self, one: ReadFrame, state: Mapping[str, object], rank: int) -> None:
        """A step is to be made. The first one of a journal: what it does not log any more comes to its place now."""
        if one.opening is self._opening:
            return
        self._opening = one.opening
        if not _is_of_this_environment(one.opening, self._described.places.devices):
            self.exactness = "tolerance"
        self.proven |= {*one.opening.proven}
        waiting = self.values.keys() & {*one.opening.proven}
        if not waiting:
            return
        described = describe(state, rank=rank)
        lengths, places = described.pieces.lengths().tolist(), described.places
        for at, name in enumerate(described.pieces.names):
            if name not in waiting:
                continue
            content = self.values[name][1]
            if len(content) == lengths[at]:
                fill_with(places.memory(at, described.pieces[at]), content)
                del self.values[name]
                waiting.remove(name)

    def note(self, one: ReadFrame, state: Mapping[str, object], rank: int) -> None:
        """A step was made: prove it, and keep what belongs to its end."""
        row, payload = one.row, one.payload
        self._prove(one, state, rank)
        for name, at in row.values.items():
            tensor = row.tensors[at]
            self.values[name] = tensor, bytes(payload[tensor.offset : tensor.offset + tensor.bytes])
        for kept, texts in ((self.replicated, row.replicated), (self.per_rank, row.per_rank)):
            for section, at in texts.items():
                tensor = row.tensors[at]
                kept[section] = bytes(payload[tensor.offset : tensor.offset + tensor.bytes])
        self.steps, self.step = self.steps + 1, one.place.step
        self.bytes += one.place.frame.frame_bytes

    def _prove(self, one: ReadFrame, state: Mapping[str, object], rank: int) -> None:
        """Compare the fingerprint of the step's window."""
        opening, row = one.opening, one.row
        if row.window is None or row.window >= opening.windows:
            if opening.by_chunks:  # the device could not digest any more
                self.exactness = "tolerance"
            return
        addresses = self._replayer.addresses()
        if addresses != self._addresses:  # a step may make slots, the first one or each
            self._described, self._addresses = describe(state, rank=rank), addresses
        pieces, places = self._described.pieces, self._described.places
        rows = {name: at for at, name in enumerate(pieces.names)}
        if any(name not in rows or rows[name] in places.apart for name in opening.proven):
            raise ReplayError(
                f"step {one.place.step} was replayed, and cannot be proven", journal=one.path,
                found="it names tensors that the state does not have", next=f"load(step={opening.after})",
            )
        at = np.array([rows[name] for name in opening.proven], np.int64)
        window = window_of(
            row.window, opening.windows, places, at, pieces.lengths()[at], state, by_chunks=opening.by_chunks
        )
        if window is None:  # a device cannot make these digests
            self.exactness = "tolerance"
            return
        if window.fingerprint() == row.fingerprint:
            return
        if self.exactness == "exact" and self._strict and not opening.by_chunks:  # a device's bits are not promised
            raise ReplayError(
                f"step {one.place.step} could not be replayed bit for bit", journal=one.path,
                found="another fingerprint than the step had; with the same torch and processor it should be the same",
                next=f"load(step={opening.after}), or an older checkpoint",
            )
        self.exactness = "tolerance"
        self.differs_from = one.place.step if self.differs_from is None else self.differs_from


def _is_of_this_environment(opening: Opening, devices: Sequence[str]) -> bool:
    """Whether steps of that journal can be expected to be the same here, bit for bit. `devices`: of the state."""
    here, expected = environment(devices), "proven" if devices else "exact"
    return (opening.torch, opening.processor, opening.exactness) == (here.torch, here.processor, expected)


def _frames(store: Store, fitted: Fitted) -> Iterator[ReadFrame]:
    """The frames of a chain, each verified; the next one is read while the caller works with one.

    raises  DamagedError where one is damaged
    """
    chain, ranks = fitted.chain, {fitted.rank, *(rank for openings in fitted.openings for rank in openings)}
    numbers = {part.journal.directory: at for at, part in enumerate(chain.parts)}
    places = {rank: list(chain.steps(store, rank)) for rank in ranks}
    count = len(places[fitted.rank])
    buffers = [{rank: FrameBuffer() for rank in ranks} for _ in range(2)]

    def read(number: int) -> ReadFrame:
        part, place = places[fitted.rank][number]
        openings, found = fitted.openings[numbers[part.journal.directory]], dict[int, ReadFrame]()
        for rank, opening in openings.items():
            theirs = places[rank][number][1] if number < len(places[rank]) else None
            if theirs is None or theirs.step != place.step:
                raise _damaged(store, part, rank, place.step, "the whole file")
            found[rank] = read_frame(store, part, theirs, opening, buffers[number % 2][rank])
        return joined(found, fitted.rank)

    with ThreadPoolExecutor(1, thread_name_prefix="flowstone-replay") as ahead:
        following = ahead.submit(read, 0) if count else None
        for number in range(count):
            assert following is not None, "there is one for each place"
            found = following.result()
            following = ahead.submit(read, number + 1) if number + 1 < count else None
            yield found


def joined(found: Mapping[int, ReadFrame], rank: int) -> ReadFrame:
    """A rank's frame, with the gradients that it borrows from others': of parameters that both step in the same act."""
    own = found[rank]
    if len(found) == 1:
        return own
    gradients: list[dict[int, tuple[TensorRow, memoryview]]] = [{} for _ in own.row.acts]
    buckets: list[list[tuple[CompressedRow, Sequence[TensorRow], memoryview]]] = [[] for _ in own.row.acts]
    for other, one in found.items():
        for turn, (act, theirs) in enumerate(zip(own.row.acts, one.row.acts, strict=False)):
            if other == rank or act.optimizer != theirs.optimizer or act.optimizer >= len(own.opening.optimizers):
                continue
            wanted = _positions(own.opening, act.optimizer, other)
            names = _names(one.opening, act.optimizer)
            for at, number in theirs.gradients:
                if at < len(names) and names[at] in wanted:
                    gradients[turn][wanted[names[at]]] = one.row.tensors[number], one.payload
            for row in theirs.compressed:
                first = row.parameters[0][0] if row.parameters else len(names)
                if first < len(names) and names[first] in wanted:
                    bucket = _with_own_numbers(row, one.opening, own.opening, act.optimizer)
                    buckets[turn].append((bucket, one.row.tensors, one.payload))
    return msgspec.structs.replace(own, borrowed=list(map(Borrowed, gradients, buckets)))


def _with_own_numbers(row: CompressedRow, theirs: Opening, own: Opening, optimizer: int) -> CompressedRow:
    """Another rank's bucket, its source and parameters as they are numbered here. What is not here gets no number."""
    numbers = {name: at for at, name in enumerate(_names(own, optimizer))}
    names, none = _names(theirs, optimizer), len(numbers)
    sections = [one.section for one in own.sources]
    section = theirs.sources[row.source].section if row.source < len(theirs.sources) else ""
    members = [(numbers.get(names[at], none) if at < len(names) else none, offset) for at, offset in row.parameters]
    source = sections.index(section) if section in sections else len(sections)
    return msgspec.structs.replace(row, source=source, parameters=tuple(members))


def _names(opening: Opening, optimizer: int) -> list[str]:
    rows = opening.optimizers
    return [name for group in rows[optimizer].groups for name in group] if optimizer < len(rows) else []


def _positions(opening: Opening, optimizer: int, owner: int) -> dict[str, int]:
    """The parameters of an optimizer whose gradients are in the file of `owner`, by name."""
    return {
        name: at
        for at, (name, rank) in enumerate(zip(_names(opening, optimizer), opening.owners[optimizer], strict=True))
        if rank == owner
    }


class FrameBuffer:
    """Memory for one frame, used again."""

    def __init__(self) -> None:
        self._pages = mmap.mmap(-1, 4096)

    def room(self, length: int) -> memoryview:
        if len(self._pages) < length:
            self._pages = mmap.mmap(-1, length)
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(self._pages)[:length]


def read_frame(store: Store, part: Part, place: FramePlace, opening: Opening, buffer: FrameBuffer) -> ReadFrame:
    path = inside(part.journal.directory, journal_file(opening.rank))
    shown = f"{store.location}/{path}"
    frame = place.frame
    data = buffer.room(frame.frame_bytes)  # which the file has: `journals.frames` has looked
    found = cast("Appends", store).read_into(path, place.offset, data)
    row = decode_document(data, frame, StepRow, path=shown) if found >= frame.frame_bytes else None
    payload = data[frame.payload_offset :]
    if row is None or any(digest(payload[t.offset : t.offset + t.bytes]) != t.digest for t in row.tensors):
        where = f"bytes {place.offset}..{place.offset + frame.frame_bytes}"
        raise _damaged(store, part, opening.rank, place.step, where)
    return ReadFrame(opening, place, row, payload, shown)


def _damaged(store: Store, part: Part, rank: int, step: int, where: str) -> DamagedError:
    path = f"{store.location}/{inside(part.journal.directory, journal_file(rank))}"
    return DamagedError(
        f"{path} is damaged: what replays step {step} differs from what was written", range=where,
        next=f"load with fallback=True for the steps before, or load(step={part.journal.opening.after})",
    )


def restore_rest(
    checkpoint: Checkpoint, state: Mapping[str, object], done: Progress, rank: int, left_out: Sequence[str]
) -> None:
    """Restore all but what the optimizers' steps have made: objects, generators, tensors that no optimizer explains.

    left_out  sections that `state` has not, and the checkpoint has
    """
    stored = stored_of(checkpoint, rank)
    try:
        replicated = {name: objects.decode_text(text, name) for name, text in done.replicated.items()}
        per_rank = {name: objects.decode_text(text, name) for name, text in done.per_rank.items()}
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise DamagedError(
            f"the objects of step {done.step} are not valid: {error!s:.300}", next="load the checkpoint by its step"
        ) from error
    stored = msgspec.structs.replace(
        stored,
        objects={name: one for name, one in {**stored.objects, **replicated}.items() if name not in left_out},
        per_rank={name: one for name, one in {**stored.per_rank, **per_rank}.items() if name not in left_out},
        equal=partial(_equal_now, stored, done.values),
    )
    restoration = prepare(state, stored, rank=rank)
    for alias in restoration.aliases:
        if not stored.equal(alias.name, alias.target):
            raise MismatchError(
                f"'{alias.name}' shares memory with '{alias.target}', and their values at step {done.step} differ",
                next="give it its own memory (clone()), and load again",
            )
    for one in restoration.differences:
        if is_of(one.name, left_out):
            continue
        raise DamagedError(
            f"'{one.name}' in the journal does not fit the state", expected=one.expected, found=one.found,
            next="load the checkpoint by its step",
        )
    _fill(restoration, describe(state, rank=rank), done, checkpoint)
    restoration.finish()


def _equal_now(stored: Stored, values: Mapping[str, tuple[TensorRow, bytes]], one: str, other: str) -> bool:
    """Whether two tensors are equal at the step that a replay has come to; True also where one is not stored."""
    if one not in stored.tensors or other not in stored.tensors:
        return True
    if stored.tied.get(one, one) == stored.tied.get(other, other):
        return True
    mine, theirs = values.get(one), values.get(other)
    if mine is None and theirs is None:
        return stored.equal(one, other)
    return mine is not None and theirs is not None and mine[1] == theirs[1]


def take_over(state: Mapping[str, object], restored: Mapping[str, object]) -> None:
    """Put values of sections that cannot change in place, such as numbers, into the caller's state."""
    for section, value in restored.items():
        if state[section] is not value:
            cast("MutableMapping[str, object]", state)[section] = value


def _fill(restoration: Restoration, live: Described, done: Progress, checkpoint: Checkpoint) -> None:
    """Bring the newest values of tensors into their memory, unless they are there. `live`: the state after the steps.

    Some of an optimizer's tensors get new memory, as those in a list do: what its steps have made is copied there.
    """
    pieces, places, lengths = restoration.pieces, restoration.places, restoration.pieces.lengths().tolist()
    here, live_lengths = {*live.places.address.tolist()}, live.pieces.lengths().tolist()
    made: dict[str, list[int]] = {}
    live_plain = live.places.host_runs
    for at, name in enumerate(live.pieces.names):
        if name in done.proven and live_plain[at]:
            made.setdefault(name, []).append(at)
    for at, piece in enumerate(pieces):
        address, known, content = int(places.address[at]), done.values.get(piece.name), None
        if known is not None:
            content = known[1]
        elif address in here or not lengths[at]:
            continue
        elif piece.name in done.proven:
            for row in made.get(piece.name, ()):
                if live.pieces.box(row) == piece.box:
                    content = bytes(bytes_at(int(live.places.address[row]), live_lengths[row]))
        else:  # memory of our own for what has not changed since the checkpoint
            content = checkpoint.read(piece.name, piece.box, framework="numpy").tobytes()
        if content is None or len(content) != lengths[at]:
            raise DamagedError(
                f"'{piece.name}' in the journal does not fit the state", next="load the checkpoint by its step"
            )
        fill_with(places.memory(at, piece), content)
