"""A durable checkpoint of every step: which saves are whole, and which go into the journal (LowDiff, arXiv 2509.04084).

    save --StepRecorder.take--> acts --describe--> what else has changed --Journaling.add--> durable, in the background

A save is whole if there is nothing to go on from yet, if what has happened since the step before cannot be replayed, or
if reading the checkpoint and replaying the journal would take longer than `recovery_s`. In the last case the step goes
into the journal as well, so that it is durable before the checkpoint is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import monotonic

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._native import xxh3_64
from flowstone.checkpoint import Checkpoint
from flowstone.commit import journals
from flowstone.commit.entries import step_directory
from flowstone.commit.read import encode_sections
from flowstone.config import JOURNAL_RATE_BYTES_PER_S, JOURNAL_VALUE_BYTES_MAX, JOURNAL_WINDOWS
from flowstone.errors import ArgumentError, StepExistsError
from flowstone.events import NotJournaled
from flowstone.format.journal import SourceRow
from flowstone.pipeline.futures import ExpeditingFuture, Save
from flowstone.pipeline.in_flight import InFlight
from flowstone.pipeline.journaling import Journaling, Kept, Lineage
from flowstone.pipeline.load_outcome import LoadReport
from flowstone.pipeline.pacing import Captures
from flowstone.pipeline.plan_cache import FenceMode
from flowstone.pipeline.save import Saves
from flowstone.pipeline.shared import SaveOptions, Shared
from flowstone.pipeline.sole_writer import SoleWriter
from flowstone.runtime.ending import without_frames
from flowstone.stage.journal_frames import Source, StepContent, bytes_at, window_of
from flowstone.stage.optimizer_steps import Act, StepRecorder
from flowstone.state import Described, describe
from flowstone.state.compressed import CompressedGradients, is_of, sources_of
from flowstone.state.stepped import environment, explained_addresses, optimizer_rows, replayable
from flowstone.table.pieces import Layout
from flowstone.trace import Spans


class _Known(msgspec.Struct):
    """What is known of the state at the step that the next record begins from.

    layout    of the state; the next step must have the same
    proven    positions of the pieces that the optimizers' steps explain
    others    positions of the pieces that they do not explain, and may change
    digests   of these, and of sections, as they were last written
    options   of each optimizer, as they were last written
    sources   of compressed gradients, by section
    """

    layout: Layout
    proven: NDArray[np.int64]
    others: NDArray[np.int64]
    digests: dict[str, int]
    options: dict[int, tuple[msgspec.Raw, ...]]
    sources: dict[str, CompressedGradients]

    @property
    def unlogged(self) -> tuple[str, ...]:
        """Sections whose tensors and objects no step has: they do not follow from compressed gradients."""
        return tuple(section for section, source in self.sources.items() if not source.exact)


class EveryStep:
    """The saves of a Checkpointer with `every_step`."""

    def __init__(self, shared: Shared, saves: Saves, options: SaveOptions, recovery_s: float) -> None:
        if not shared.store.capabilities.appends:
            raise ArgumentError(
                f"every_step: files in {shared.store.location} cannot grow", next="use a directory, or leave it out"
            )
        if shared.group.size > 1:
            raise ArgumentError(
                "every_step: journals of several ranks are not written yet", found=f"{shared.group.size} ranks",
                next="leave it out, or train on one rank",
            )
        self._store, self._group, self._emit = shared.store, shared.group, shared.emit
        self._turn, self._outcome, self._frozen = shared.turn, shared.outcome, shared.frozen
        self._saves, self._recovery_s, self._options = saves, recovery_s, shared.options
        self._journaling = Journaling(shared)
        self._recorder = StepRecorder(self._before_step)
        self._records = InFlight(  # of the journal
            shared.store, lambda: None, on_error=options.on_error, max_unsaved_steps=options.max_unsaved_steps
        )
        self._lineage: Lineage | None = None  # of the state at the last save, or load
        self._known: _Known | None = None
        self._is_open = False  # a journal has begun at, or before, the lineage
        self._loaded: Checkpoint | None = None  # the one with which the last load began
        self._root: Save | None = None  # the whole save that the lineage begins with; None: `_loaded`
        self._whole: Save | None = None  # the last one
        self._replay_s, self._replay_bytes = 0.0, 0  # of the steps since then
        self.read_rate = 0.0  # bytes per second of the last load; 0: there was none

    # Saves

    def save(self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans) -> Save:
        """Save a step, in the journal or whole. Returns at once."""
        began = monotonic()
        self._outcome.check_whole()
        is_rooted = self._root is None or self._root.committed.done()
        self._records.settle(leave=1 if is_rooted else 1 << 30)  # until then no step is durable, and none waits for it
        self._note_whole()
        self._check_new(step)
        with self._saves.fencing.state_lock:
            acts, why = self._recorder.take()
            described = None if self._lineage is None else self._describe(state)
            content = None
            if described is not None:
                content, why = self._content(step, acts, why or self._other_sources(state), described)
            if content is None:
                return self._save_whole(step, state, fence, spans, why)
            return self._journal(content, state, fence, spans, began)

    def _journal(
        self, content: StepContent, state: Mapping[str, object], fence: FenceMode, spans: Spans, began: float
    ) -> Save:
        """Append the step; and save it whole as well, if the journal has become too long."""
        self._saves.sole_writer.check()
        lineage, known = self._lineage, self._known
        assert lineage is not None, "a step has content only where there is something to go on from"
        assert known is not None, "as above"
        step = content.step
        if not self._is_open:
            number = journals.next_number(self._store)
            identity = self._journaling.begin(lineage, self._kept(state, known), number)
            lineage, self._is_open = Lineage(lineage.step, lineage.checkpoint, identity), True
        save = Save(step)
        save.committed.check = partial(self._turn.check_thread, "result")
        self._journaling.add(save, content, partial(self._end_step, save, self._root), began)
        self._records.add(save)
        self._replay_s += sum(act.seconds for act in content.acts)
        self._replay_bytes += sum(act.gradient_bytes for act in content.acts)
        self._lineage = Lineage(step, None, lineage.journal)
        if self._recovery_estimate_s() > self._recovery_s and (self._whole is None or self._whole.committed.done()):
            return self._begin_whole(step, state, fence, spans)
        return save

    def _save_whole(
        self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans, why: str
    ) -> Save:
        """A whole save that nothing leads to; `why`: what could not be replayed, "" if there was nothing to go on from.
        """
        if why:
            self._emit(NotJournaled(step, why))
        self._journaling.await_durable()
        self._lineage = self._known = None
        return self._begin_whole(step, state, fence, spans)

    def _begin_whole(self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans) -> Save:
        """Save `state` whole; the steps after it go into a journal of its own."""
        led_to = self._lineage
        save = self._saves.save(step, state, fence, spans)
        self._whole, self._is_open, self._replay_s, self._replay_bytes = save, False, 0.0, 0
        self._root = save if led_to is None else self._root
        self._know(state, Lineage(step, self._saves.newest_draft, None if led_to is None else led_to.journal))
        return save

    def _note_whole(self) -> None:
        """Learn how the last whole save ended. If it failed, steps go on from the journal that leads to it; where none
        does, nothing leads to what follows, and the next save is whole.
        """
        if self._root is not None and self._root.committed.failed():
            self._root = self._lineage = self._known = None

    def _end_step(self, save: Save, root: Save | None, error: BaseException | None) -> None:
        """On the journal's thread: the step is durable, or has failed. What it leads from has to be durable, too.

        root  the whole save that its journals begin with; None: a checkpoint that was loaded
        """
        if error is not None:
            save.committed.set_exception(without_frames(error))
        elif root is None:
            assert self._loaded is not None, "a lineage begins with a save or a load"
            save.committed.set_result(self._loaded.with_journal(save.step))
        else:
            root.committed.add_done_callback(lambda _: _end_with(save, root))

    def _check_new(self, step: int) -> None:
        self._saves.in_flight.check_new(step)
        newest = self._records.newest if self._lineage is None else self._lineage.step
        if newest is not None and step <= newest and self._outcome.superseded_above is None:
            raise StepExistsError(
                f"cannot save step {step} into {self._store.location}", found=f"step {newest}, in its journal",
                next=f"save a later step, or call rewind({step - 1 if step else 0}) first to set newer steps aside",
            )

    # What a step is made of

    def _describe(self, state: Mapping[str, object]) -> Described:
        known = None if self._known is None else self._known.layout
        group = self._group
        return describe(state, rank=group.rank, known=known, whole=group.alone or group.size == 1, frozen=self._frozen)

    def _content(
        self, step: int, acts: list[Act], why: str, described: Described
    ) -> tuple[StepContent | None, str]:
        """What leads from the last step to this one; None, and why, if it cannot be told."""
        known = self._known
        assert known is not None, "a lineage is known with its state"
        optimizers, cannot = replayable(described.optimizers, described.unguarded)
        why = why or cannot or self._journaling.broken
        if not why and described.layout is not known.layout and described.layout != known.layout:
            why = "the tensors of the state have changed"
        if not why and not self._recorder.watch(optimizers, tuple(known.sources.values())):
            why = "the optimizers of the state have changed"
        if why:
            return None, why
        values, large = self._changed_values(described, known)
        if large:
            return None, large
        replicated, per_rank = encode_sections(described.objects), encode_sections(described.per_rank)
        repeats = []
        for act in acts:
            repeats.append(known.options.get(act.optimizer) == act.options)
            known.options[act.optimizer] = act.options
        number = step % JOURNAL_WINDOWS
        places, proven = described.places, known.proven
        window = window_of(
            number, JOURNAL_WINDOWS, places.address[proven], described.pieces.lengths()[proven],
            [places.owners[at] for at in proven.tolist()],
        )
        return StepContent(
            step, acts, repeats, values, self._changed_sections(known, replicated),
            self._changed_sections(known, per_rank), window,
        ), ""

    def _other_sources(self, state: Mapping[str, object]) -> str:
        known = self._known
        assert known is not None, "a lineage is known with its state"
        if not known.sources and not sources_of(state):
            return ""
        same = {section: id(one) for section, one in sources_of(state).items()}
        changed = same != {section: id(one) for section, one in known.sources.items()}
        return "what decompresses gradients has changed" if changed else ""

    def _changed_values(self, described: Described, known: _Known) -> tuple[dict[str, Source], str]:
        """Copies of what no optimizer explains, and has changed; and why that cannot be logged."""
        places, pieces, total = described.places, described.pieces, 0
        found: dict[str, Source] = {}
        lengths = pieces.lengths()
        for at in known.others.tolist():
            length, piece = int(lengths[at]), pieces[at]
            view = bytes_at(int(places.address[at]), length) if length else memoryview(b"")
            digest = xxh3_64(view)
            if known.digests.get(piece.name) == digest:
                continue
            total += length
            if total > JOURNAL_VALUE_BYTES_MAX:
                return {}, f"'{piece.name}' has changed, which no optimizer explains, and is too large for the journal"
            known.digests[piece.name] = digest
            copy = Source.of_bytes(bytes(view))
            found[piece.name] = msgspec.structs.replace(copy, dtype=piece.dtype.name, shape=piece.box.shape)
        return found, ""

    def _changed_sections(self, known: _Known, texts: Mapping[str, bytes]) -> dict[str, bytes]:
        changed = {}
        for section, text in texts.items():
            if section in known.unlogged:
                continue
            digest, name = xxh3_64(text), f"{section}\0"
            if known.digests.get(name) != digest:
                known.digests[name] = digest
                changed[section] = text
        return changed

    def _know(self, state: Mapping[str, object], lineage: Lineage) -> None:
        """Note the state as it is: it is that of a checkpoint, or of a step that was replayed."""
        described = self._describe(state)
        optimizers, cannot = replayable(described.optimizers, described.unguarded)
        if cannot:
            self._lineage = self._known = None
            return
        sources = sources_of(state)
        self._recorder.watch(optimizers, tuple(sources.values()))
        self._recorder.reset()
        layout, places = described.layout, described.places
        own = np.array(sorted(explained_addresses(optimizers)), np.uint64)
        explained = np.isin(places.address, own)
        apart = np.zeros(len(places.address), np.bool_)
        apart[list(places.apart)] = True
        unlogged = [section for section, source in sources.items() if not source.exact]
        logged = np.ones(len(places.address), np.bool_)
        if unlogged:
            logged = np.array([not is_of(name, unlogged) for name in layout.pieces.names], np.bool_)
        others = np.flatnonzero(~explained & logged & ~np.array(layout.lazy, np.bool_))
        if apart[others].any():
            self._lineage = self._known = None  # what is on a device, or strided, is not compared here
            return
        known = _Known(layout, np.flatnonzero(explained & ~apart), others, {}, {}, sources)
        for at, length in zip(others.tolist(), layout.pieces.lengths()[others].tolist(), strict=True):
            view = bytes_at(int(places.address[at]), length) if length else memoryview(b"")
            known.digests[layout.pieces.names[at]] = xxh3_64(view)
        for texts in (encode_sections(described.objects), encode_sections(described.per_rank)):
            self._changed_sections(known, texts)
        self._known, self._lineage = known, lineage

    def _kept(self, state: Mapping[str, object], known: _Known) -> Kept:
        optimizers, _ = replayable(self._describe(state).optimizers, ())
        rows, _ = optimizer_rows(state, optimizers, self._group.rank)
        sources = tuple(SourceRow(section, one.kind, one.exact) for section, one in known.sources.items())
        return Kept(rows, tuple(known.layout.pieces.names[at] for at in known.proven.tolist()), environment(), sources)

    def _recovery_estimate_s(self) -> float:
        """How long a load would take now: read the checkpoint, then read and replay the journal, side by side."""
        rate = self.read_rate or JOURNAL_RATE_BYTES_PER_S
        if self._journaling.seconds and not self.read_rate:
            rate = max(rate, self._journaling.bytes / self._journaling.seconds)
        base_bytes = 0 if self._known is None else int(self._known.layout.pieces.lengths().sum())
        return (base_bytes + self._replay_bytes) / rate + self._replay_s

    # Fences, loads, ends

    def _before_step(self) -> None:
        """Called when an optimizer is about to step: what is being fingerprinted must not change."""
        self._journaling.fingerprinted.wait()

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """While inside, a load changes the state, and may replay steps: none of that is noted."""
        self._journaling.await_durable()
        self._lineage = self._known = self._root = None
        self._recorder.mute(on=True)
        try:
            yield
        finally:
            self._recorder.mute(on=False)

    def _note_load(self, state: Mapping[str, object], report: LoadReport) -> None:
        """Steps go on from what was loaded, if it was all of a checkpoint, and the newest step."""
        replay, self._is_open = report.replay, False
        if self._outcome.superseded_above is not None or (replay is not None and replay.reason):
            return
        base = report.step if replay is None else replay.base
        checkpoint = Checkpoint(self._store, step_directory(base), self._options)
        described = self._describe(state)
        stored = {*checkpoint.index.tensors.names}
        sections = {*checkpoint.objects, *checkpoint.contents.per_rank}
        if stored != {*described.pieces.names} or sections != {*state}:
            return
        chain = None if replay is None else journals.newest_chain(self._store)
        if replay is not None and (chain is None or chain.newest != report.step):
            return
        parent = None if chain is None else chain.parts[-1].journal.opening.id
        self._loaded = checkpoint
        self.read_rate = report.bytes / report.seconds if report.seconds and replay is None else 0.0
        self._know(state, Lineage(report.step, checkpoint.manifest.id if parent is None else None, parent))

    def around_load(self, state: Mapping[str, object], load: Callable[[], LoadReport]) -> LoadReport:
        """Call `load`, which changes the state and may replay steps. Later steps go on from there."""
        with self._loading():
            report = load()
        self._note_load(state, report)
        return report

    def rewind(self, step: int) -> None:
        """Set every step above `step` aside. The next save is whole."""
        self.await_all()
        self.settle()
        self._saves.rewind(step)
        self._lineage = self._known = None
        self._records.newest = step

    def pass_fence(self) -> None:
        """Wait until the state may change."""
        self._saves.pass_fence()
        self._before_step()

    def await_all(self) -> None:
        """Wait until the saves in flight have ended, and other ranks know which of them this rank did not make."""
        self._saves.await_all()
        self._records.await_all()

    def await_ends(self) -> None:
        """Wait until the saves in flight have ended."""
        self._saves.await_ends()
        self._records.await_all()

    def settle(self) -> None:
        """Wait until every save so far is durable. Raises the first failure that was not raised yet."""
        self._saves.settle()
        self._records.settle()

    @property
    def in_flight(self) -> InFlight:
        return self._saves.in_flight

    @property
    def captures(self) -> Captures:
        return self._saves.captures

    @property
    def sole_writer(self) -> SoleWriter:
        return self._saves.sole_writer

    def end(self, *, wait: bool = True) -> None:
        """Steps are noted no more."""
        self._recorder.end()
        self._journaling.end(wait=wait)
        self._saves.end(wait=wait)


def _end_with(save: Save, root: Save) -> None:
    """Complete a durable step once `root` has ended, which it leads from."""
    failure = ExpeditingFuture.exception(root.committed)
    if failure is not None:
        save.committed.set_exception(failure)
    else:
        save.committed.set_result(ExpeditingFuture.result(root.committed).with_journal(save.step))
