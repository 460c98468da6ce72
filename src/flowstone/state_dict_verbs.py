"""Further verbs of a Checkpointer: saves and loads of state dicts, `prepare`, and `drain` for tiers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from flowstone.commit.entries import step_directory
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError, FlowstoneError
from flowstone.extensions import extension
from flowstone.reading.checkpoint import Checkpoint
from flowstone.runtime.verb_lock import VerbLock, exclusive_verb
from flowstone.runtime.writer_lock import finish_saves_of_others
from flowstone.store.base import canonical_location
from flowstone.stores import arguments as calls
from flowstone.trace import Spans

if TYPE_CHECKING:
    from flowstone.commit.writer import StoreWriter
    from flowstone.events.rare_events import Prepared
    from flowstone.layouts.layout_rules import LoadRule
    from flowstone.load.conductor import Loads
    from flowstone.ranks import RankGroup
    from flowstone.session.futures import Save
    from flowstone.session.load_outcome import LoadReport
    from flowstone.store.base import Store
    from flowstone.strategies import SaveStrategy

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Verbs = TypeVar("_Verbs", bound="WaitingVerbs")


class StateDictVerbs:
    """The verbs of a Checkpointer for state dicts.

    A state dict is a dict of sections, as for `save` and `load`, for example {"model": ..., "optimizer": ...}. Its
    values are not modules and optimizers, but the results of their `state_dict()`, or of `get_model_state_dict` and
    `get_optimizer_state_dict` of torch.distributed.checkpoint.state_dict (flattened or not). Tensors get the same names
    as with `save`, so `load` reads checkpoints of `save_state_dict`, and `load_state_dict` those of `save`. DTensors
    are resharded for any number of ranks.
    """

    _store: Store
    _verb_lock: VerbLock
    _group: RankGroup
    _saves: SaveStrategy
    _loads: Loads
    _pid: int
    _closed: bool

    @exclusive_verb
    def save_state_dict(self, step: int, state_dict: Mapping[str, object]) -> Save:
        """Save `state_dict` as `step`. Every tensor is captured before this returns, so all may change afterwards.

        If an optimizer's `state_dict()` numbers its parameters and has no `param_names`, tensors are named by these
        numbers. Raises the errors of `save`.
        """
        spans = Spans("save", step, self._group.rank)
        self._check_open()
        spans.step, state_dict, _ = calls.to_save(step, state_dict, "auto")
        unpacked = extension("torch.unpack")(_checked(state_dict))
        return self._saves.save(spans.step, unpacked.state, "now", spans)

    @exclusive_verb
    def load_state_dict(
        self,
        state_dict: Mapping[str, object],
        *,
        step: int | None = None,
        rules: LoadRule | Sequence[LoadRule] = (),
        verify_first: bool = False,
        fallback: bool = False,
    ) -> LoadReport:
        """Load the newest checkpoint, or that of `step`, into the tensors of `state_dict`, in place. Checkpoint and
        `state_dict` must match, except for differences that `rules` allow.

        Plain values are replaced in the dicts. If an optimizer has no state tensors yet, they are created. State
        tensors and settings that the checkpoint lacks are removed; in a flattened optimizer dict they raise
        MismatchError. If the dict is a copy of the object's state, pass it to `load_state_dict()` or
        `set_optimizer_state_dict()` afterwards. Parameters of an optimizer that are numbered in `state_dict` are
        matched by their order.

        Arguments and errors are those of `load`.
        """
        self._check_open()
        flags = {"verify_first": verify_first, "fallback": fallback}
        state_dict, step, rules = calls.to_load(state_dict, step, rules, flags)
        self._saves.await_all()
        unpacked = extension("torch.unpack")(_checked(state_dict), self._stored(step))
        report = self._loads.load_newest(step, unpacked.state, rules, verify_first=verify_first, fallback=fallback)
        unpacked.pack()
        return report

    def _check_open(self) -> None:
        calls.check_open(self._store.location, closed=self._closed, pid=self._pid)

    def _stored(self, step: int | None) -> Mapping[str, object]:
        """The objects of the checkpoint that will be loaded. Empty if it cannot be read; the load then reports why."""
        try:
            if step is None:
                newest = self._loads.find_newest()
                return {} if newest is None else newest.objects
            return Checkpoint(self._store, step_directory(step), EngineOptions()).objects
        except FlowstoneError:
            return {}


def _checked(state_dict: object) -> Mapping[str, object]:
    """Return `state_dict`. Raises ArgumentError if it is not a dict of sections."""
    if not isinstance(state_dict, Mapping):
        raise ArgumentError(
            f"{calls.shown(state_dict)} is not a state dict", expected="a dict of sections",
            next='write {"model": model.state_dict()}, or give the objects themselves to save() and load()',
        )
    return state_dict


class WaitingVerbs(StateDictVerbs):
    """The verbs that prepare memory, and that wait for tiers and for other Checkpointers."""

    _store_writer: StoreWriter
    _locations: tuple[str, ...]  # of its stores
    made_at: str

    @exclusive_verb
    def prepare(self, state: Mapping[str, object]) -> Prepared:
        """Allocate staging memory for saves of `state` before training, so that the first save is as fast as later
        ones.

        Several threads touch the memory of a full save, within `budget_bytes`. For tensors on a GPU, the memory is also
        pinned, in slabs of up to 1 GiB, on the GPU's NUMA node. Returns once that is done. Tensors that do not exist
        yet are not counted: an optimizer has state only after its first step, or after a load. Each rank prepares its
        own memory. Writes no file. Without this call, saves allocate memory in the background. The returned event is
        also emitted.

        raises  UnsupportedStateError  an object cannot be saved; the error names its path
                CollisionError         two tensors or values of the state would get the same name
                StateError             the current stream records a CUDA graph
                BudgetError            the system has no address space for the budget
        """
        self._check_open()
        return self._saves.prepare(calls.to_prepare(state))

    @exclusive_verb
    def drain(self, timeout_s: float | None = None) -> Mapping[str, tuple[int, ...]]:
        """Wait until each tier has all steps that it should have, or another attempt to write them has failed. Returns,
        by each tier's location, the steps that the tier still lacks; with a single store, an empty mapping.

        timeout_s  the longest wait; None: each tier's `drain_s`

        raises     SaveFailedError  a save failed, and no call has raised that failure yet
        """
        self._check_open()
        self._saves.await_saves()
        self._saves.sole_writer.await_retention()
        return self._store_writer.drain(timeout_s)

    def _finish_saves_of_others(self, verb: str) -> None:
        """Wait for saves in flight of this process's other Checkpointers into the same stores, before `verb` begins."""
        if self._closed or os.getpid() != self._pid:
            return  # the verb refuses both cases
        self._verb_lock.check_not_nested(verb)
        try:
            finish_saves_of_others(self, self._locations)
        except Exception:
            raise
        except BaseException as error:  # from a signal handler: other ranks may wait in the same call
            self._verb_lock.on_interrupt(error)
            raise

    def finish_saves(self, location: str) -> None:
        """If this Checkpointer's store is at `location`, wait until its saves and their follow-up work have ended."""
        if self._closed or os.getpid() != self._pid or self._verb_lock.is_background_thread():
            return
        if canonical_location(location) in map(canonical_location, self._locations):
            self._saves.await_ends()
            self._saves.sole_writer.await_retention()


def after_saves_of_others(
    method: Callable[Concatenate[_Verbs, _P], _Result],
) -> Callable[Concatenate[_Verbs, _P], _Result]:
    """Like `exclusive_verb`, but first wait for saves of other Checkpointers of this process into the same stores. The
    lock is taken after that wait: a callback of such a save may call a verb of this Checkpointer, which needs the lock.
    """
    verb, in_turn = method.__name__, exclusive_verb(method)

    @wraps(method)
    def afterwards(self: _Verbs, *args: _P.args, **named: _P.kwargs) -> _Result:
        self._finish_saves_of_others(verb)
        return in_turn(self, *args, **named)

    return cast("Callable[Concatenate[_Verbs, _P], _Result]", afterwards)
