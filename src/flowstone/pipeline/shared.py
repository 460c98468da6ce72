"""What the loads and the saves of one Checkpointer share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from flowstone.config import LAG_STEPS, EngineOptions
from flowstone.errors import FlowstoneError
from flowstone.pipeline.load_outcome import LoadOutcome
from flowstone.ranks import RankGroup
from flowstone.runtime.telling import Teller
from flowstone.runtime.turns import Turn
from flowstone.state import Frozen
from flowstone.store.base import Store

if TYPE_CHECKING:
    from flowstone.quantize import Quantize


class Shared(msgspec.Struct, frozen=True):
    """Shared parts of one Checkpointer.

    turn     one verb at a time
    emit     emits an event
    frozen   samples of parameters that no optimizer owns: saves compare them, loads invalidate them
    outcome  result of the last load, for the next save
    """

    store: Store
    options: EngineOptions
    group: RankGroup
    turn: Turn
    emit: Teller
    frozen: Frozen
    outcome: LoadOutcome


class SaveOptions(msgspec.Struct, frozen=True):
    """Options of a Checkpointer that only saves use. `lag_steps`: with every_step."""

    budget_bytes: int | None
    saves_in_flight: int
    on_error: Literal["raise", "continue"]
    max_unsaved_steps: int | None
    quantize: tuple[Quantize, ...] = ()
    lag_steps: int = LAG_STEPS


def address_exchange(
    stores: Sequence[Store], leave_out: Callable[[Sequence[tuple[Store, FlowstoneError]]], Store] | None
) -> Callable[[RankGroup], Store]:
    """Introduce this rank to the other nodes of stores that are on several; most are not. Every rank calls the result,
    which exchanges the addresses and returns the store that takes the saves.

    leave_out  is told which stores cannot be used, and why, and returns the first one that can; None: there is no other
    """
    if not any(hasattr(store, "introduce") for store in stores):
        return lambda _: stores[0]
    from flowstone.pipeline.multi_node import MultiNodeStores  # imported here: others do not need it

    return MultiNodeStores(stores, leave_out).exchange_addresses
