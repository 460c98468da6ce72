"""The fence: a change that an optimizer makes waits for what a save has not captured yet.

That is its step, and what else its class has methods for, as their names tell: `train` and `eval` (optimizers that are
schedule-free have other weights for either), SAM's first and second step, swaps and averages.
"""

from __future__ import annotations

import inspect
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch

from flowstone.state import takes_hook

_CHANGES = re.compile(r"(^|_)(train|eval|step|swap|restore|average|sync|merge|perturb|ascent|descent|update)(_|$)")
_log = logging.getLogger("flowstone")


class Fence:
    """Hooks in front of what optimizers do. One set for each optimizer, however many saves it was in.

    The hooks hold neither `wait`'s owner nor the optimizers alive, and are not part of what an
    optimizer pickles, copies or saves.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` is a bound method; it returns once the state may change, at once when nothing is under way."""
        self._wait = weakref.WeakMethod(wait)
        self._guarded: dict[int, tuple[weakref.ref[object], list[Callable[[], None]]]] = {}
        self._told: set[str] = set()

    def guard(self, optimizers: Iterable[object]) -> None:
        """From now on the next steps of these wait."""
        self._guarded = {key: known for key, known in self._guarded.items() if known[0]() is not None}
        for optimizer in optimizers:
            known = self._guarded.get(id(optimizer))
            if known is None or known[0]() is not optimizer:  # another one may have had its place
                self._guarded[id(optimizer)] = weakref.ref(optimizer), list(self._put_around(optimizer))

    def tell(self, unguarded: Sequence[str]) -> None:
        """Log, once, which optimizers could not be guarded: what they step has been captured before `save` returned."""
        for name in unguarded:
            if name not in self._told:
                self._told.add(name)
                _log.warning(
                    "cannot put a hook on the step of '%s': all that it changes is captured before save returns. "
                    "Put the optimizer inside of it into the state", name,
                )

    def lift(self) -> None:
        """Take the hooks away."""
        for _, undo in self._guarded.values():
            for one in undo:
                one()
        self._guarded.clear()

    def _put_around(self, optimizer: object) -> Iterator[Callable[[], None]]:
        """Put hooks around its methods; yields what takes them away."""
        names = {name for name in dir(type(optimizer)) if _CHANGES.search(name) and name[:1] != "_"}
        names -= set(dir(torch.optim.Optimizer))
        step = vars(optimizer).get("step")  # that of a scheduler calls torch's; any other need not
        if takes_hook(optimizer):
            yield optimizer.register_step_pre_hook(_before_step(self._wait)).remove
        if not takes_hook(optimizer) or not (step is None or hasattr(step, "_wrapped_by_lr_sched")):
            names.add("step")
        for name in sorted(names):
            if name in vars(optimizer) or inspect.isfunction(inspect.getattr_static(type(optimizer), name, None)):
                held_back = HeldBack(optimizer, name, self._wait)
                held_back.put()
                yield held_back.take_away


class HeldBack:
    """A method of one object that waits before it is called. An attribute of that object, which shadows its class's.

    Where the object is copied or pickled with its attributes, the copy has the method as it was.
    """

    def __init__(self, owner: object, name: str, wait: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._owner, self._name, self._wait = weakref.ref(owner), name, wait
        self._before = vars(owner).get(name)  # what somebody else has put there

    def put(self) -> None:
        vars(self._owner())[self._name] = self

    def take_away(self) -> None:
        """Put back what was there before, unless somebody else has put something there since, which may call this."""
        fields = vars(self._owner()) if self._owner() is not None else {}
        if fields.get(self._name) is self:
            del fields[self._name]
            if self._before is not None:
                fields[self._name] = self._before

    @property
    def _method(self) -> Any:
        owner = self._owner()
        return getattr(type(owner), self._name).__get__(owner) if self._before is None else self._before

    def __call__(self, *args: Any, **named: Any) -> Any:
        _wait(self._wait)
        return self._method(*args, **named)

    @property
    def __func__(self) -> HeldBack:  # schedulers bind what a bound method has of that name, and put it into our place
        return self

    def __get__(self, owner: object, kind: type | None = None) -> HeldBack:
        return self

    @property
    def __wrapped__(self) -> Any:
        return self._method

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._method, name)

    def __reduce__(self) -> Any:
        return (getattr, (self._owner(), self._name)) if self._before is None else (_itself, (self._before,))


_OWN = frozenset({"_owner", "_name", "_wait", "_before"})


def _itself(method: Any) -> Any:
    return method


def _before_step(wait: weakref.WeakMethod[Callable[[], None]]) -> Callable[..., Any]:
    # A compiled step breaks its graph here: waiting is for the interpreter.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(optimizer: object, args: tuple[Any, ...], named: dict[str, Any]) -> object:
        closure = args[1] if len(args) > 1 else named.get("closure")
        if closure is None or not type(optimizer).__module__.startswith("torch.optim."):
            _wait(wait)
            return None
        # Torch's own change nothing before a closure has run, which is forward and backward: they need not wait.
        late = partial(_call_then_wait, closure, wait)
        return ((args[0], late, *args[2:]), named) if len(args) > 1 else (args, {**named, "closure": late})

    return cast("Callable[..., Any]", before_step)


def _call_then_wait(closure: Callable[[], object], wait: weakref.WeakMethod[Callable[[], None]]) -> object:
    found = closure()
    _wait(wait)
    return found


def _wait(wait: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = wait()
    if alive is not None:
        alive()
