"""The objects that the loads and the saves of one Checkpointer share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from flowstone.config import LAG_STEPS, RECOVERY_S, EngineOptions, Keep, KeepRule
from flowstone.errors import FlowstoneError
from flowstone.ranks import RankGroup
from flowstone.reading.checkpoint import Checkpoint
from flowstone.runtime.event_emitter import EventEmitter
from flowstone.runtime.verb_lock import VerbLock
from flowstone.runtime.writer_lock import Owner
from flowstone.session.futures import ExpeditingFuture, ReportedFuture, Save
from flowstone.session.load_outcome import LoadOutcome
from flowstone.state import FrozenParameters
from flowstone.store.base import Store

if TYPE_CHECKING:
    from flowstone.codecs.quantize import Quantize
    from flowstone.replica.replica_events import Replica


class Shared(msgspec.Struct, frozen=True):
    """The objects that loads and saves of one Checkpointer share.

    verb_lock  lets one method of the Checkpointer run at a time
    emit       passes an event to the callbacks
    frozen     samples of parameters that no optimizer owns: saves compare them, loads invalidate them
    outcome    result of the last load, for the next save
    """

    store: Store
    options: EngineOptions
    group: RankGroup
    verb_lock: VerbLock
    emit: EventEmitter
    frozen: FrozenParameters
    outcome: LoadOutcome


class SaveOptions(msgspec.Struct, frozen=True):
    """Options of a Checkpointer that only saves use; `recovery_s` and `lag_steps` only with `every_step`."""

    budget_bytes: int | None
    saves_in_flight: int
    on_error: Literal["raise", "continue"]
    max_unsaved_steps: int | None
    quantize: tuple[Quantize, ...] = ()
    lag_steps: int = LAG_STEPS
    keep: Keep | KeepRule | None = None
    every_step: bool | Replica = False
    recovery_s: float = RECOVERY_S


class SaveHooks(msgspec.Struct, frozen=True, eq=False):
    """The callbacks of one Checkpointer's saves.

    owner             returns the Checkpointer, or None if it no longer exists: `owner` does not keep it alive
    on_threads_start  called directly after the threads that finish saves have been started
    on_new_save       makes the result of `save` from its futures `captured` and `committed`
    """

    owner: Callable[[], Owner | None]
    on_threads_start: Callable[[], None]
    on_new_save: Callable[[int, ExpeditingFuture[None], ReportedFuture[Checkpoint]], Save] = Save


def address_exchange(
    stores: Sequence[Store], leave_out: Callable[[Sequence[tuple[Store, FlowstoneError]]], Store] | None
) -> Callable[[RankGroup], Store]:
    """Prepare to exchange addresses between the nodes of stores that span several nodes. Returns a function that every
    rank calls; it exchanges the addresses, and returns the store into which saves go.

    leave_out  takes the stores that cannot be used, with their errors, and returns the first usable one. None: there is
               only one store
    """
    if not any(hasattr(store, "introduce") for store in stores):
        return lambda _: stores[0]
    from flowstone.session.multi_node import MultiNodeStores  # imported here: most stores do not need it

    return MultiNodeStores(stores, leave_out).exchange_addresses
