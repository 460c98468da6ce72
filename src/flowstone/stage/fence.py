"""The fence: before an optimizer changes the state, it waits until pending saves have captured the state.

The optimizer's step waits, and so do other methods that change parameters, which are known by name: `train` and `eval`
(schedule-free optimizers swap weights in them), the first and second step of SAM, swaps and averages.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from flowstone.errors import StateError
from flowstone.extensions import extension
from flowstone.log import log
from flowstone.state.imported import class_if_imported

_CHANGES = re.compile(r"(^|_)(train|eval|step|swap|restore|average|sync|merge|perturb|ascent|descent|update)(_|$)")

_OURS = "is_flowstone_hook"

SAVE_OUTSIDE = "call save and load before you record the graph, or after it: a replay of the graph would not save"
FENCE_BEFORE = "a save is still being copied: call fence() before you record the graph, and before each replay of it"


def recording_error(action: str, remedy: str) -> StateError:
    return StateError(
        f"cannot {action} inside of a CUDA graph capture", found="the current stream records a graph", next=remedy
    )


class OptimizerFence:
    """Hooks that run before an optimizer's methods. Each optimizer gets one set of hooks, for all saves.

    The hooks keep neither the optimizers nor the owner of the function `wait` alive. They are left out when an
    optimizer is pickled, copied or saved.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait`: a bound method that returns once the state may change; it returns at once if no save is unfinished.
        """
        self._wait = weakref.WeakMethod(wait)
        self._guarded: dict[int, tuple[weakref.ref[object], list[Callable[[], None]]]] = {}
        self._warned: set[str] = set()

    def guard(self, optimizers: Iterable[object]) -> None:
        """Make the steps of these optimizers wait from now on."""
        self._guarded = {key: guard for key, guard in self._guarded.items() if guard[0]() is not None}
        for optimizer in optimizers:
            guard = self._guarded.get(id(optimizer))
            if guard is None or guard[0]() is not optimizer:  # another object may have got the same id
                self._guarded[id(optimizer)] = weakref.ref(optimizer), list(self._put_around(optimizer))

    def warn_unguarded(self, unguarded: Sequence[str]) -> None:
        """Log once which optimizers cannot be made to wait, so that their tensors are captured before `save` returns.
        """
        for name in unguarded:
            if name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "cannot put a hook on the step of '%s': save returns only once the tensors that this optimizer "
                    "changes are captured. Put the wrapped optimizer into the state instead", name,
                )

    def warn_recorded(self) -> None:
        """Log once that a CUDA graph records an optimizer's step: hooks do not run when the graph is replayed."""
        if "" not in self._warned:  # "" stands for this warning, as no optimizer has that name
            self._warned.add("")
            log.warning(
                "a CUDA graph records an optimizer's step: replays of the graph run no hooks and do not wait for "
                "saves. Call fence() before each replay",
            )

    def remove_hooks(self) -> None:
        """Remove the hooks."""
        for _, undo in self._guarded.values():
            for remove in undo:
                remove()
        self._guarded.clear()

    def _put_around(self, optimizer: Any) -> Iterator[Callable[[], None]]:
        """Wrap the optimizer's methods so that they wait. Yields functions that restore the methods."""
        has_step_hooks = extension("torch.has_step_hooks")
        names = {name for name in dir(type(optimizer)) if _CHANGES.search(name) and name[:1] != "_"}
        names -= set(dir(class_if_imported("torch.optim", "Optimizer")))
        step = vars(optimizer).get("step")  # a scheduler's wrapper calls torch's step; other wrappers may not
        if has_step_hooks(optimizer):
            yield optimizer.register_step_pre_hook(_before_step(self._wait)).remove
        if not has_step_hooks(optimizer) or not (step is None or hasattr(step, "_wrapped_by_lr_sched")):
            names.add("step")
        for name in sorted(names):
            if name in vars(optimizer) or inspect.isfunction(inspect.getattr_static(type(optimizer), name, None)):
                held_back = FencedMethod(optimizer, name, self._wait)
                held_back.install()
                yield held_back.remove


class FencedMethod:
    """A method of one object that waits before each call: an attribute of the object that hides the class's method.

    If the object is copied or pickled with its attributes, the copy has the original method.
    """

    def __init__(self, owner: object, name: str, wait: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._owner, self._name, self._wait = weakref.ref(owner), name, wait
        self._before = vars(owner).get(name)  # an attribute that other code has set

    def install(self) -> None:
        vars(self._owner())[self._name] = self

    def remove(self) -> None:
        """Restore the previous attribute, unless other code has replaced this attribute: the replacement may call this
        method.
        """
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
    # Schedulers take the __func__ of a bound method, bind it again, and replace this attribute by the result.
    def __func__(self) -> FencedMethod:
        return self

    def __get__(self, owner: object, kind: type | None = None) -> FencedMethod:
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
    # torch.compile breaks the graph of a compiled step here, as only the interpreter can wait.
    @own_hook
    def before_step(optimizer: object, args: tuple[Any, ...], named: dict[str, Any]) -> object:
        closure = args[1] if len(args) > 1 else named.get("closure")
        if closure is None or not type(optimizer).__module__.startswith("torch.optim."):
            _wait(wait)
            return None
        # torch's own optimizers change nothing before their closure, forward and backward, has run.
        late = partial(_call_then_wait, closure, wait)
        return ((args[0], late, *args[2:]), named) if len(args) > 1 else (args, {**named, "closure": late})

    return before_step


def own_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a hook on an optimizer as Flowstone's. Code that torch.compile has compiled calls the hook uncompiled."""
    made = cast("Callable[..., Any]", class_if_imported("torch", "compiler").disable(hook))
    setattr(made, _OURS, True)
    return made


def is_own_hook(hook: object) -> bool:
    return getattr(hook, _OURS, False) is True


def _call_then_wait(closure: Callable[[], object], wait: weakref.WeakMethod[Callable[[], None]]) -> object:
    loss = closure()
    _wait(wait)
    return loss


def _wait(wait: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = wait()
    if alive is not None:
        alive()
