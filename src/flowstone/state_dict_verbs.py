"""Further verbs: for state dicts, which frameworks hand over in the place of modules and optimizers; for tiers; and
for what comes before training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from flowstone import arguments as calls
from flowstone.checkpoint import Checkpoint
from flowstone.commit.entries import step_directory
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError, FlowstoneError
from flowstone.runtime.turns import Turn, one_at_a_time
from flowstone.runtime.writer_lock import finish_saves_of_others
from flowstone.store.base import place_of
from flowstone.trace import Spans

if TYPE_CHECKING:
    from flowstone.commit.writer import StoreWriter
    from flowstone.events import Prepared
    from flowstone.layout_rules import LoadRule
    from flowstone.pipeline.every_step import EveryStep
    from flowstone.pipeline.futures import Save
    from flowstone.pipeline.load import Loads
    from flowstone.pipeline.load_outcome import LoadReport
    from flowstone.pipeline.save import Saves
    from flowstone.ranks import RankGroup
    from flowstone.store.base import Store

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Verbs = TypeVar("_Verbs", bound="TierVerbs")


class StateDictVerbs:
    """The verbs of a Checkpointer for state dicts.

    A state dict is a dict of sections, as for `save` and `load`, in which modules and optimizers are replaced by what
    their `state_dict()`, or torch.distributed.checkpoint.state_dict's `get_model_state_dict` and
    `get_optimizer_state_dict` (flattened or not), returned. They are saved under the names that the objects have:
    either loads what the other has saved, and DTensors are cut anew for any number of ranks.
    """

    _store: Store
    _turn: Turn
    _group: RankGroup
    _saves: Saves | EveryStep
    _loads: Loads
    _pid: int
    _closed: bool

    @one_at_a_time
    def save_state_dict(self, step: int, state_dict: Mapping[str, object]) -> Save:
        """Save `state_dict` as `step`. Every tensor is captured before this returns, so that any may change at once.

        An optimizer's `state_dict()` that numbers its parameters, and gives no `param_names`, is saved under numbers.
        Raises what `save` raises.
        """
        spans = Spans("save", step, self._group.rank)
        self._check_open()
        spans.step, state_dict, _ = calls.to_save(step, state_dict, "auto")
        from flowstone.state.unpacked import unpack  # imported here: most training states are objects

        return self._saves.save(spans.step, unpack(_checked(state_dict)).state, "now", spans)

    @one_at_a_time
    def load_state_dict(
        self,
        state_dict: Mapping[str, object],
        *,
        step: int | None = None,
        rules: LoadRule | Sequence[LoadRule] = (),
        verify_first: bool = False,
        fallback: bool = False,
    ) -> LoadReport:
        """Load the newest checkpoint, or that of `step`, into the tensors of `state_dict`, in place. Strict.

        Plain values are replaced in the dicts, and slots of an optimizer that has none yet are created. Slots and
        settings that the checkpoint does not have are removed; a flattened optimizer needs them: MismatchError. If the
        dict is no view of the object's own state, pass it to `load_state_dict()` or `set_optimizer_state_dict()`.
        Parameters of an optimizer that are numbered in `state_dict` are matched by their order.

        Arguments are those of `load`, and it raises what that raises.
        """
        self._check_open()
        flags = {"verify_first": verify_first, "fallback": fallback}
        state_dict, step, rules = calls.to_load(state_dict, step, rules, flags)
        self._saves.await_all()
        from flowstone.state.unpacked import unpack  # imported here, as above

        unpacked = unpack(_checked(state_dict), self._stored(step))
        report = self._loads.load_newest(step, unpacked.state, rules, verify_first=verify_first, fallback=fallback)
        unpacked.pack()
        return report

    def _check_open(self) -> None:
        calls.check_open(self._store.location, closed=self._closed, pid=self._pid)

    def _stored(self, step: int | None) -> Mapping[str, object]:
        """The objects of the checkpoint that is going to be loaded; none where that fails: the load says why."""
        try:
            if step is None:
                found = self._loads.newest()
                return {} if found is None else found.objects
            return Checkpoint(self._store, step_directory(step), EngineOptions()).objects
        except FlowstoneError:
            return {}


def _checked(state_dict: object) -> Mapping[str, object]:
    """The state dict itself; ArgumentError for what has no sections."""
    if not isinstance(state_dict, Mapping):
        raise ArgumentError(
            f"{calls.shown(state_dict)} is no state dict", expected="a dict of sections",
            next='write {"model": model.state_dict()}, or give the objects themselves to save() and load()',
        )
    return state_dict


class TierVerbs(StateDictVerbs):
    """What a Checkpointer waits for besides its own saves."""

    _store_writer: StoreWriter
    _locations: tuple[str, ...]  # of its stores
    made_at: str

    @one_at_a_time
    def prepare(self, state: Mapping[str, object]) -> Prepared:
        """Make staging memory ready for saves of `state`, before training: then the first save does not pay for it.

        Touches memory for a whole save, within `budget_bytes`, by several threads; for tensors on a GPU pins it, in
        slabs of up to 1 GiB, near that GPU. Returns once that is done. What `state` does not have yet is not counted:
        an optimizer has its slots after its first step, or after a load. Each rank does it by itself, without the
        others. Writes no file. Without it, saves grow their memory in the background. Emits the event that it returns.

        raises  UnsupportedStateError  an object that cannot be saved; names its path
                CollisionError         two paths of the state make the same name
                StateError             the current stream records a CUDA graph
                BudgetError            the system has no address space for the budget
        """
        self._check_open()
        return self._saves.prepare(calls.to_prepare(state))

    @one_at_a_time
    def drain(self, timeout_s: float | None = None) -> Mapping[str, tuple[int, ...]]:
        """Wait until every tier has what it should have, or has failed once more. Returns the steps that still wait, by
        the tier's location; with a single store, nothing.

        timeout_s  at most so long; None: as long as each tier's `drain_s`

        raises     SaveFailedError for a save whose failure was not raised yet
        """
        self._check_open()
        self._saves.settle()
        self._saves.sole_writer.await_retention()
        return self._store_writer.drain(timeout_s)

    def _finish_saves_of_others(self, verb: str) -> None:
        """Wait for saves in flight of this process's other Checkpointers into the same stores, before `verb` begins."""
        if self._closed or os.getpid() != self._pid:
            return  # the verb refuses both
        self._turn.check(verb)
        try:
            finish_saves_of_others(self, self._locations)
        except Exception:
            raise
        except BaseException as error:  # from a signal handler: other ranks may wait in the same call
            self._turn.on_interrupt(error)
            raise

    def finish_saves(self, location: str) -> None:
        """Wait until saves into the store at `location` have ended, with their follow-up work, if it is this store."""
        if self._closed or os.getpid() != self._pid or self._turn.is_background():
            return
        if place_of(location) in map(place_of, self._locations):
            self._saves.await_ends()
            self._saves.sole_writer.await_retention()


def after_saves_of_others(
    method: Callable[Concatenate[_Verbs, _P], _Result],
) -> Callable[Concatenate[_Verbs, _P], _Result]:
    """`one_at_a_time`, after saves of other Checkpointers of this process into a store of it. It waits before the turn:
    a callback of one of those saves may call a verb of this Checkpointer, which then waits for that turn.
    """
    verb, in_turn = method.__name__, one_at_a_time(method)

    @wraps(method)
    def afterwards(self: _Verbs, *args: _P.args, **named: _P.kwargs) -> _Result:
        self._finish_saves_of_others(verb)
        return in_turn(self, *args, **named)

    return cast("Callable[Concatenate[_Verbs, _P], _Result]", afterwards)
