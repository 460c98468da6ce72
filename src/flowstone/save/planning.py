"""Makes a plan of what this rank writes of a state. If the ranks have already agreed on this state's layout, the plan
is made at once; otherwise the ranks have to agree first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flowstone.config import DIGESTED_ON_DEVICES, EngineOptions
from flowstone.coordination.messages import Assignment, Contribution
from flowstone.coordination.save_coordinator import SaveCoordinator
from flowstone.events.phases import SaveStarted
from flowstone.extensions import extension, find_extension
from flowstone.plan.write import Writer
from flowstone.save.fencing import Fencing
from flowstone.save.pacing import Captures
from flowstone.save.pending_save import PendingSave, SaveRequest
from flowstone.save.plan_cache import CachedPlan, FenceMode, plan_save
from flowstone.save.replica_samples import sample_replicas
from flowstone.session.shared import SaveOptions, Shared
from flowstone.stage.device import await_pinned, copy_current_streams
from flowstone.state import StateDescription, describe, find_state_dicts, warn_state_dict_saved
from flowstone.store.base import shares_of

if TYPE_CHECKING:
    from flowstone.codecs.coding import EncodingChooser
    from flowstone.codecs.quantize import Quantize
    from flowstone.codecs.unmatched_rules import UnmatchedRules
    from flowstone.delta.baselines import Baselines


def coding_of(options: EngineOptions, quantize: tuple[Quantize, ...]) -> EncodingChooser | None:
    """The object that chooses the pieces to encode; None: no save encodes any."""
    if options.compress == "off" and not quantize:
        return None
    coding: EncodingChooser = extension("codecs")(options.compress, quantize, options.kept_bytes)
    return coding


class Planner:
    """Describes the states of one Checkpointer's saves, and plans the writes of this rank.

    last       the plan of the last save; replaced by any thread
    baselines  the base of the next save (the earlier checkpoint to whose chunks it may refer); None: every save is
               written in full
    """

    def __init__(
        self, shared: Shared, options: SaveOptions, coordinator: SaveCoordinator,
        unmatched: UnmatchedRules | None, captures: Captures, fencing: Fencing,
    ) -> None:
        self._store, self._options, self._group = shared.store, shared.options, shared.group
        self._emit, self._frozen = shared.emit, shared.frozen
        self._coordinator, self._unmatched = coordinator, unmatched
        self._captures, self._fencing = captures, fencing
        self._coding = coding_of(shared.options, options.quantize)
        delta = find_extension("delta")
        self.baselines: Baselines | None = None if delta is None else delta(shared)
        self.last: CachedPlan | None = None

    # On the caller's thread

    def describe_state(self, pending: PendingSave, state: Mapping[str, object], fence: FenceMode) -> StateDescription:
        """List the state's tensors and values. Sample replicas (tensors that several ranks hold) before the state can
        change.
        """
        queued = self._captures.any_awaits_plan  # plans of earlier saves may change which pieces this rank writes
        last = None if self.last is None or queued else self.last
        described = self._describe(state, last)
        if self._unmatched is not None:
            self._unmatched.check_described(described, is_all=self._group.size == 1)
        await_pinned(described.places.owners)
        describing = pending.spans.lap("described")
        assignment = None if queued else self._coordinator.assignment(described.layout)
        digests = self._options.watch in DIGESTED_ON_DEVICES
        samples = sample_replicas(pending.save.step, described, assignment, digests=digests)
        streams = copy_current_streams(described.places.devices)
        pending.note_request(SaveRequest(described, fence, assignment, last, describing, streams), samples)
        return described

    def _describe(self, state: Mapping[str, object], last: CachedPlan | None) -> StateDescription:
        if self.last is None and (idiom := find_state_dicts(state)):
            warn_state_dict_saved(idiom)
        layout = last.layout if last is not None and self._coordinator.assignment(last.layout) is not None else None
        room_bytes = None if self._coordinator.is_alone else self._captures.budget_bytes // 2
        described = describe(
            state, rank=self._group.rank, known=layout, whole=self._group.alone, frozen=self._frozen,
            copied_bytes_max=room_bytes,
        )
        self._fencing.hooks.warn_unguarded(described.unguarded)
        return described

    def plan_now(self, pending: PendingSave) -> CachedPlan | None:
        """The plan of this rank's writes, if it can be made without other ranks; None: the ranks have to agree first.
        """
        assignment = pending.request.assignment
        if assignment is None:
            return None
        return self._plan(pending, assignment, pending.request.last_plan, self._coding)

    # On the writer's thread

    def plan_later(self, pending: PendingSave, assignment: Assignment) -> CachedPlan:
        """The plan of this rank's writes, after the ranks have agreed which pieces this rank writes."""
        return self._plan(
            pending, assignment, None, None if self._coding is None else self._coding.without_memory_access()
        )

    def _plan(
        self, pending: PendingSave, assignment: Assignment, last: CachedPlan | None, coding: EncodingChooser | None
    ) -> CachedPlan:
        request = pending.request
        self.last = plan = plan_save(
            request.described, last, assignment, fence=request.fence, coding=coding,
            writer=Writer(self._group.rank, shares_of(self._store)),
            base=None if self.baselines is None else self.baselines.find(assignment),
        )
        pending.note_plan(plan)
        return plan

    def emit_started(self, pending: PendingSave) -> None:
        """Emit SaveStarted: the save is planned."""
        plan, request = pending.planned, pending.request
        seconds = request.describing.seconds, pending.spans.lap("planned").seconds, pending.waited_s
        is_reused = plan is request.last_plan
        self._emit(SaveStarted(pending.save.step, len(plan.plan.pieces), plan.plan.bytes, is_reused, *seconds))

    @property
    def compress(self) -> str:
        """A text that says which tensors the next save encodes, and why; "" if it encodes none."""
        return "" if self._coding is None else self._coding.why

    def note_written(self, pending: PendingSave, written: Contribution) -> None:
        """After this save was committed, record to which of its chunks the next save may refer, and choose from the
        times that it took what the next save encodes.
        """
        if self._coding is not None:
            event = self._coding.learn_from_save(
                pending.save.step, pending.begun.plan, written.receipt, pending.compress
            )
            if event is not None:
                self._emit(event)
        if self.baselines is not None:
            self.baselines.advance(pending.base, pending.begun.referred)
