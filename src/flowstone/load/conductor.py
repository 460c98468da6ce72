"""The order of a load's phases: compare state and checkpoint, then read tensors, then restore all other values.

    Manifest --> plan --ReadPlan--> store --bytes--> stage --> the caller's memory

`Loads.load` calls all phases, on the thread that calls `Checkpointer.load`. The engine's threads (docs/ARCHITECTURE.md,
Threads) read, verify and copy bytes while the phase `read` waits for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from threading import Event
from typing import TYPE_CHECKING

from msgspec.structs import replace

from flowstone.commit.entries import step_directory
from flowstone.commit.manifests import path_inside
from flowstone.errors import FlowstoneError, NoCheckpointError, StorageError, is_damage
from flowstone.events.phases import Loaded
from flowstone.extensions import extension, find_extension
from flowstone.format.segment import is_of_rank
from flowstone.load.loading import PlannedLoad, finish, plan_load, progress_reporter, read, report, verified_read
from flowstone.load.read_ahead import ReadAhead, read_ahead
from flowstone.load.requested_names import RequestedNames, gather_requests
from flowstone.load.steps import LoadCandidates, PrefetchedStep, StepFinder, skipped_step_note
from flowstone.log import log
from flowstone.reading.checkpoint import Checkpoint
from flowstone.reading.compare import LoadRequest, request_load
from flowstone.runtime.progress import terminal_progress
from flowstone.session.load_outcome import LoadReport
from flowstone.session.shared import Shared
from flowstone.store.base import Store
from flowstone.trace import Spans

if TYPE_CHECKING:
    from flowstone.layouts.layout_rules import LoadRule


class Loads:
    """The loads of one Checkpointer, by a group of N ranks, N at least 1."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._store, self._options, self._group = shared.store, shared.options, shared.group
        self._emit, self._frozen, self._outcome = shared.emit, shared.frozen, shared.outcome
        self._steps = StepFinder(shared.store, shared.options, shared.group)

    def find_newest(self) -> Checkpoint | None:
        """The newest committed checkpoint; None if there is none yet."""
        return self._steps.find_newest()

    def load_newest(
        self, step: int | None, state: Mapping[str, object], rules: Sequence[LoadRule], *, verify_first: bool,
        fallback: bool,
    ) -> LoadReport:
        """Load the newest step, or `step`. With `fallback`, if that step is damaged, load the newest undamaged step
        before it.
        """
        done: LoadReport | None = None
        while done is None:
            with ExitStack() as resources:
                candidates = self._steps.find_candidates(step, fallback=fallback, resources=resources)
                done = self._load_first_of(
                    candidates, state, rules, verify_first=verify_first, may_be_gone=step is None
                )
            if done is not None and candidates.journaled_step is not None and done.step == candidates.steps[0]:
                done = extension("journal.resume")(
                    self._shared, done, state, candidates.chain, newest=candidates.journaled_step, rules=rules,
                    fallback=fallback,
                )
        return done

    def _load_first_of(
        self, candidates: LoadCandidates, state: Mapping[str, object], rules: Sequence[LoadRule], *,
        verify_first: bool, may_be_gone: bool,
    ) -> LoadReport | None:
        """Load the first undamaged step of the candidates. With `may_be_gone`, return None if another writer has
        removed that step.
        """
        skipped: list[str] = []
        for step in candidates.steps:
            try:
                done = self.load(
                    step, state, rules, verify_first=verify_first, prefetched=candidates.prefetched_step(step)
                )
            except FlowstoneError as error:
                if may_be_gone and self._outcome.unfinished is None and self._steps.is_gone(step, error):
                    return None
                if step == candidates.steps[-1] or not is_damage(error):
                    raise
                log.warning("cannot load step %d, trying an older one: %s", step, error)
                from flowstone.events.rare_events import FellBack  # imported here: few loads fall back

                self._emit(FellBack(step, str(error)))
                skipped.append(skipped_step_note(step, error))
            else:
                if step != candidates.steps[0]:
                    self._outcome.fall_back(step)
                return dataclasses.replace(done, notes=(*done.notes, *skipped, *candidates.notes))
        raise NoCheckpointError(f"no checkpoint in {self._store.location}", next="check the path")

    def load(
        self, step: int, state: Mapping[str, object], rules: Sequence[LoadRule], *, verify_first: bool,
        prefetched: PrefetchedStep | None = None,
    ) -> LoadReport:
        """Load one step: request, agree, plan, agree, read, finish, agree. Raises the errors of `Checkpointer.load`.

        prefetched  the manifest and files of `step` that were read in advance, if any
        """
        spans = Spans("load", step, self._group.rank)
        with ExitStack() as held:
            request, requests, ahead, store = self._request(prefetched or PrefetchedStep(step), state, rules, held)
            spans.lap("wanted")
            ready = self._plan(request, requests, verify_first=verify_first)
            ready = self._share_reads(replace(ready, ahead=ahead, held=held.pop_all()))
        spans.lap("planned")
        # Set before the first byte can change: from here on only a successful load makes the state consistent again,
        # unless it is certain that no rank has changed a byte.
        unfinished_before = self._outcome.begin(step)
        self._frozen.reset()
        stamps = self._stamps(ready.checkpoint)
        begun, failure = Event(), None
        try:
            with terminal_progress(f"loading step {step}") as show:
                scattered = read(ready, store, begun, progress_reporter(step, ready.plan.bytes, self._emit, show))
            spans.lap("read", ready.plan.bytes)
            spans.add_engine_spans(scattered.receipt.spans)
            if scattered.failed and not scattered.written and self._group.is_known_everywhere(True):
                self._outcome.undo(unfinished_before)
            finish(ready, scattered)
            spans.lap("finished")
        except Exception as error:
            if self._group.is_known_everywhere(not begun.is_set()):
                self._outcome.undo(unfinished_before)
            failure = error
        self._group.confirm_all(f"the load of step {step}", failure)
        spans.lap("agreed")
        self._outcome.succeed(verified_read(ready, stamps))
        done = report(ready, scattered, spans.since_begin("load", ready.plan.bytes, track="loads").seconds)
        self._emit(Loaded(step, done.bytes, done.seconds))
        return done

    def _stamps(self, checkpoint: Checkpoint) -> Mapping[str, str | None]:
        """Size and time stamps of the files that a later save of this rank may refer to. Empty if the store cannot link
        files.
        """
        if not self._store.capabilities.links:
            return {}
        names = [row.name for row in checkpoint.manifest.segments if is_of_rank(row.name, self._group.rank)]
        try:
            return {name: self._store.stamp(path_inside(step_directory(checkpoint.step), name)) for name in names}
        except StorageError:
            return {}  # then no save refers to this checkpoint; the read that follows reports errors of the store

    def _request(
        self, prefetched: PrefetchedStep, state: Mapping[str, object], rules: Sequence[LoadRule], held: ExitStack
    ) -> tuple[LoadRequest, RequestedNames, ReadAhead | None, Store]:
        """List the tensors that this rank's state needs, and gather the names that all ranks need. Returns both, the
        read-ahead (None: there is none), and the store for all other reads.
        """
        phase = f"the request for step {prefetched.step}"
        ahead: ReadAhead | None = None
        try:
            checkpoint, store = self._steps.open_checkpoint(prefetched)
            if self._group.size == 1:  # with several ranks, each needs only a part of the checkpoint
                ahead = read_ahead(checkpoint, state, rules, store)
            if ahead is not None:
                held.callback(ahead.close)
            request = request_load(checkpoint, state, rules=rules, rank=self._group.rank, ranks=self._group.size)
        except Exception as error:
            self._group.confirm_all(phase, error)
            raise
        return request, gather_requests(self._group, phase, request), ahead, store

    def _plan(self, request: LoadRequest, requests: RequestedNames, *, verify_first: bool) -> PlannedLoad:
        """Plan which bytes are read into which memory, once state and checkpoint agree on all ranks."""
        failure: Exception | None = None
        try:
            ready = plan_load(request, requests.elsewhere, requests.unwanted, verify_first=verify_first)
        except Exception as error:
            failure = error
        self._group.confirm_all(f"the comparison with step {request.checkpoint.step}", failure)
        return ready

    def _share_reads(self, ready: PlannedLoad) -> PlannedLoad:
        """If possible, divide the reads among the ranks of this node. Returns the load with these shared reads."""
        if self._group.size == 1:
            return ready
        try:
            share_reads = find_extension("node_reads")
            node_reads = None if share_reads is None else share_reads(
                ready.checkpoint, ready.destinations.rounds[0].plan, self._store, self._group, ready.held,
                willing=self._options.share_reads,
            )
            return replace(ready, node_reads=node_reads)
        except BaseException:
            ready.held.close()
            raise
