"""How a Checkpointer saves and loads: with one store, with a journal of every step, or with several tiers.
`make_strategy` creates the objects for each of these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from flowstone.commit.writer import StoreWriter
from flowstone.extensions import extension
from flowstone.load.conductor import Loads
from flowstone.runtime.exit_hook import ExitHook
from flowstone.runtime.threads import Threads
from flowstone.runtime.writer_lock import Owner
from flowstone.save.in_flight import InFlight
from flowstone.save.pacing import Captures
from flowstone.save.plan_cache import FenceMode
from flowstone.save.saves import Saves
from flowstone.save.sole_writer import SoleWriter
from flowstone.session.futures import Save
from flowstone.session.load_outcome import LoadReport
from flowstone.session.shared import SaveHooks, SaveOptions, Shared
from flowstone.trace import Spans

if TYPE_CHECKING:
    from flowstone.events.rare_events import Prepared
    from flowstone.tiered.tiering import TierSetup


class SaveStrategy(Protocol):
    """How a Checkpointer makes saves. Implemented by Saves (for one store, and for tiers) and EveryStep."""

    @property
    def captures(self) -> Captures: ...
    @property
    def sole_writer(self) -> SoleWriter: ...

    def save(self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans) -> Save:
        """Save `state` as `step`. See Checkpointer.save."""

    def prepare(self, state: Mapping[str, object]) -> Prepared:
        """Make staging memory ready for saves of `state`. See Checkpointer.prepare."""

    def around_load(self, state: Mapping[str, object], load: Callable[[], LoadReport]) -> LoadReport:
        """Call `load`, which changes the state, and do what the strategy needs before and after it."""

    def rewind(self, step: int) -> None:
        """Set every step above `step` aside on all ranks, so that none is loaded. See Checkpointer.rewind."""

    def pass_fence(self) -> None:
        """Wait until all saves called so far are captured; then the state may change."""

    def await_all(self) -> None:
        """Wait until the saves in flight have ended, and other ranks know which saves this rank skipped."""

    def await_ends(self) -> None:
        """Wait until the saves in flight have ended; an interrupt ends this wait and changes nothing."""

    def await_saves(self) -> None:
        """Wait until all saves called so far are durable. Raises the first failure that no call has raised yet."""

    def end(self, *, wait: bool = True) -> None:
        """Make no more saves. Optimizer steps no longer wait for captures."""


class Strategy(msgspec.Struct, frozen=True, eq=False):
    """How one Checkpointer saves and loads. `store_writer`: the writer of its store, or of all its tiers."""

    saves: SaveStrategy
    loads: Loads
    store_writer: StoreWriter


def make_strategy(
    shared: Shared, options: SaveOptions, tiers: TierSetup | None, owner: Owner, end: ExitHook
) -> Strategy:
    """Create the objects that make the saves and loads of the Checkpointer `owner`.

    tiers  the tiers; None: there is only one store
    end    the hook that closes the Checkpointer at exit if it is still open
    """
    emit, verb_lock, weak_owner = shared.emit, shared.verb_lock, weakref.ref(owner)
    captures = Captures(
        shared.store, options.budget_bytes, shared.options.write_bytes_per_s, copies=shared.group.size > 1
    )
    in_flight = InFlight(
        shared.store, captures.expedite, on_error=options.on_error, max_unsaved_steps=options.max_unsaved_steps
    )
    journal = extension("journal")(shared, options, captures) if options.every_step else None
    # A step may still be written into a journal that will be removed. Its sync would wait for the removal.
    before_removal = _nothing if journal is None else journal.await_durable
    threads = Threads(verb_lock.mark_background_thread, before_removal)
    on_empty, on_start = partial(threads.remove, weak_owner), partial(end.before_threads_end, in_flight.expedite)
    if tiers is None:
        store_writer = StoreWriter(shared.store, options.keep, emit.removed, emit.left, on_empty, before_removal)
        hooks, loads = SaveHooks(weak_owner, on_start), Loads(shared)
    else:
        store_writer = tiers.open_writer(emit, verb_lock, in_flight, on_empty, before_removal)
        hooks, loads = SaveHooks(weak_owner, on_start, tiers.new_save), tiers.make_loads(shared)
    plain = Saves(shared, options, hooks, store_writer, captures, in_flight, threads)
    return Strategy(plain if journal is None else journal.make_saves(plain), loads, store_writer)


def _nothing() -> None: ...
