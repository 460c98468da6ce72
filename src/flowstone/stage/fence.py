"""The fence: a change by an optimizer waits for what a save has not captured yet.

Fenced are its step, and other methods of its class with known names: `train` and `eval` (schedule-free optimizers
swap weights there), SAM's first and second step, swaps and averages.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch

from flowstone.errors import StateError
from flowstone.log import log
from flowstone.state import takes_hook

_CHANGES = re.compile(r"(^|_)(train|eval|step|swap|restore|average|sync|merge|perturb|ascent|descent|update)(_|$)")

_OURS = "is_flowstone_hook"

SAVE_OUTSIDE = "call save and load before the capture, or after it: a replay of the graph would not save"
FENCE_BEFORE = "a save is not captured yet: call fence() before the capture begins, and before each replay of the graph"


def recording_error(what: str, remedy: str) -> StateError:
    return StateError(
        f"cannot {what} inside of a CUDA graph capture", found="the current stream records a graph", next=remedy
    )


class Fence:
    """Hooks that run before an optimizer's methods. One set per optimizer, in however many saves it was.

    The hooks keep neither `wait`'s owner nor the optimizers alive, and are not part of what an optimizer pickles,
    copies or saves.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` is a bound method; it returns once the state may change, at once if no save is under way."""
        self._wait = weakref.WeakMethod(wait)
        self._guarded: dict[int, tuple[weakref.ref[object], list[Callable[[], None]]]] = {}
        self._told: set[str] = set()

    def guard(self, optimizers: Iterable[object]) -> None:
        """From now on the next steps of these optimizers wait."""
        self._guarded = {key: known for key, known in self._guarded.items() if known[0]() is not None}
        for optimizer in optimizers:
            known = self._guarded.get(id(optimizer))
            if known is None or known[0]() is not optimizer:  # another object may have got the same id
                self._guarded[id(optimizer)] = weakref.ref(optimizer), list(self._put_around(optimizer))

    def tell(self, unguarded: Sequence[str]) -> None:
        """Log once which optimizers could not be guarded: what they change was captured before `save` returned."""
        for name in unguarded:
            if name not in self._told:
                self._told.add(name)
                log.warning(
                    "cannot put a hook on the step of '%s': all that it changes is captured before save returns. "
                    "Put the optimizer inside of it into the state", name,
                )

    def tell_recorded(self) -> None:
        """Log once that a CUDA graph records a step: this hook does not run when the graph is replayed."""
        if "" not in self._told:  # no optimizer has that name
            self._told.add("")
            log.warning(
                "a CUDA graph records an optimizer's step: its replays run no hook, and do not wait for saves. "
                "Call fence() before each replay",
            )

    def lift(self) -> None:
        """Remove the hooks."""
        for _, undo in self._guarded.values():
            for one in undo:
                one()
        self._guarded.clear()

    def _put_around(self, optimizer: object) -> Iterator[Callable[[], None]]:
        """Wrap its methods; yields functions that undo that."""
        names = {name for name in dir(type(optimizer)) if _CHANGES.search(name) and name[:1] != "_"}
        names -= set(dir(torch.optim.Optimizer))
        step = vars(optimizer).get("step")  # a scheduler's wrapper calls torch's step; any other need not
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
    """A method of one object that waits before each call. An attribute of that object, hiding the class's method.

    If the object is copied or pickled with its attributes, the copy has the original method.
    """

    def __init__(self, owner: object, name: str, wait: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._owner, self._name, self._wait = weakref.ref(owner), name, wait
        self._before = vars(owner).get(name)  # an attribute that other code has set

    def put(self) -> None:
        vars(self._owner())[self._name] = self

    def take_away(self) -> None:
        """Restore the previous attribute, unless other code has replaced ours since; its replacement may call ours."""
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
    def __func__(self) -> HeldBack:  # schedulers bind the __func__ of a bound method, and put the result in our place
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
    # A compiled step breaks its graph here: only the interpreter can wait.
    @own_hook
    def before_step(optimizer: object, args: tuple[Any, ...], named: dict[str, Any]) -> object:
        closure = args[1] if len(args) > 1 else named.get("closure")
        if closure is None or not type(optimizer).__module__.startswith("torch.optim."):
            _wait(wait)
            return None
        # Torch's own optimizers change nothing before the closure has run, which is forward and backward.
        late = partial(_call_then_wait, closure, wait)
        return ((args[0], late, *args[2:]), named) if len(args) > 1 else (args, {**named, "closure": late})

    return before_step


def own_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of ours on an optimizer, told from others'. Compiled code calls it as it is."""
    made = cast("Callable[..., Any]", torch.compiler.disable(hook))  # type: ignore[no-untyped-call]
    setattr(made, _OURS, True)
    return made


def is_own_hook(hook: object) -> bool:
    return getattr(hook, _OURS, False) is True


def _call_then_wait(closure: Callable[[], object], wait: weakref.WeakMethod[Callable[[], None]]) -> object:
    found = closure()
    _wait(wait)
    return found


def _wait(wait: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = wait()
    if alive is not None:
        alive()
