"""Optimizer steps as they happen: hooks around each step note what would replay it.

Gradients are not copied where they rest after the step: the loop lets go of them, and makes new ones. A loop that keeps
their memory (`zero_grad(set_to_none=False)`, buckets of DDP) is recognised by it, and gets copies into memory that is
used again; so does the first step, of which that is not known yet, and an optimizer that changes gradients itself.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any, cast

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flowstone.errors import UnsupportedStateError
from flowstone.format import objects
from flowstone.stage.compressed_gradients import Compressed, compress
from flowstone.stage.fence import is_own_hook, own_hook
from flowstone.stage.unchanged import Seen
from flowstone.state.compressed import CompressedGradients
from flowstone.state.shards import is_dtensor
from flowstone.state.stepped import local, slots_of, stepped_parameters

_COMPILED = "compile_wrapper"  # the function in torch's eval_frame.py that calls what torch.compile has made
_NOT_OPTIONS = frozenset({"params", "param_names"})


class Gradient(msgspec.Struct, frozen=True, eq=False):
    """A parameter's gradient, as its optimizer got it.

    parameter  position among all parameters of the optimizer
    tensor     kept alive; what this rank holds
    version    of the tensor when it was noted; None: a copy, which does not change
    """

    parameter: int
    tensor: torch.Tensor
    version: int | None

    @property
    def is_unchanged(self) -> bool:
        return self.version is None or self.tensor._version == self.version


class Act(msgspec.Struct, frozen=True, eq=False):
    """One step of one optimizer; see format.journal.ActRow.

    copies        memory of a pool that gradients were copied to; give it back once they are written
    copy_always   have gradients copied from now on: the loop changes them after the step
    compressed    gradients that are logged in the form in which they were exchanged
    uncompressed  why not all are that were; "" if all are
    """

    optimizer: int
    options: tuple[msgspec.Raw, ...]
    gradients: tuple[Gradient, ...]
    generator: torch.Tensor | None
    grad_scale: float | None
    found_inf: float | None
    seconds: float
    copies: Callable[[], None]
    copy_always: Callable[[], None]
    compressed: tuple[Compressed, ...] = ()
    uncompressed: str = ""

    @property
    def is_unchanged(self) -> bool:
        """Whether what is to be written is what it was, as far as version counters tell."""
        return all(one.is_unchanged for one in self.gradients) and all(one.is_unchanged for one in self.compressed)

    @property
    def compressed_parameters(self) -> list[int]:
        """The parameters whose gradients are logged in the form in which they were exchanged."""
        return [at for one in self.compressed for at, _ in one.parameters]

    @property
    def parameters(self) -> list[int]:
        """The parameters that had a gradient."""
        return [*(one.parameter for one in self.gradients), *self.compressed_parameters]

    @property
    def gradient_bytes(self) -> int:
        """Of gradients, or of what they are decompressed from."""
        return sum(one.tensor.nbytes for one in self.gradients) + sum(one.nbytes for one in self.compressed)


class _Begun(msgspec.Struct):
    """A step that has begun. `tensors`: the gradients themselves, where they were copied. `generators`: of devices."""

    at: float
    act: Act
    tensors: list[torch.Tensor]
    versions: list[int]
    generators: dict[torch.device, torch.Tensor]


class StepRecorder:
    """The hooks of one Checkpointer on the optimizers of its state.

    before_step  a bound method that is called before each step; held weakly, so that hooks keep nothing alive
    """

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._before_step = weakref.WeakMethod(before_step)
        self._watched: list[_Watched] = []
        self._sources: tuple[CompressedGradients, ...] = ()
        self._acts: list[Act] = []
        self._gradient_bytes, self._room_bytes = 0, 0
        self._why = ""
        self._is_muted = False
        self._open: _Watched | None = None
        self._begun: _Begun | None = None
        self._depth = 0  # of steps inside of the open one

    def watch(
        self, optimizers: Sequence[torch.optim.Optimizer], sources: Sequence[CompressedGradients] = (), *,
        room_bytes: int,
    ) -> bool:
        """Note the steps of these, and of no others. Returns whether they were watched before, with these parameters.

        sources     of their gradients, where these are exchanged compressed
        room_bytes  for the gradients of several steps, until they are taken; if they take more, none is kept
        """
        self._sources, self._room_bytes = tuple(sources), room_bytes
        known = [one.is_of(optimizer) for one, optimizer in zip(self._watched, optimizers, strict=False)]
        same = len(self._watched) == len(optimizers) and all(known)
        if not same:
            self.end()
            self._watched = [_Watched(number, one) for number, one in enumerate(optimizers)]
        for one in self._watched:
            one.put_around(self._pre, self._post)
        return same

    def reset(self) -> None:
        """Forget the steps so far: the state is known as it is now."""
        self._forget_acts()
        for one in self._watched:
            one.note()

    def _forget_acts(self) -> None:
        self._acts, self._why, self._open, self._depth = [], "", None, 0
        self._gradient_bytes = 0

    def mute(self, *, on: bool) -> None:
        """While on, steps are not noted: they are replays."""
        self._is_muted = on

    def take(self) -> tuple[list[Act], str]:
        """The steps since the last call; and why they do not explain the state, "" if they do."""
        why = self._why or ("a step of an optimizer did not end" if self._open is not None else "")
        for one in self._watched:
            why = why or one.changed_outside()
        acts = self._acts
        for act in acts:
            if not act.is_unchanged:
                act.copy_always()
                why = why or f"a gradient of {self._kind(act)} was changed after the step; from now on they are copied"
        self._forget_acts()
        return acts, why

    def _kind(self, act: Act) -> str:
        return self._watched[act.optimizer].kind

    def end(self) -> None:
        """Remove the hooks."""
        for one in self._watched:
            one.let_go()
        self._watched = []

    # Around each step

    def _pre(self, number: int, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._is_muted:
            return
        if number >= len(self._watched):
            return
        watched = self._watched[number]
        if self._open is not None:
            if self._open is not watched:
                self._why = self._why or f"{type(optimizer).__name__} is stepped by another optimizer"
            self._depth += 1  # a class whose step calls that of its base
            return
        before_step = self._before_step()
        if before_step is None:  # its Checkpointer is gone
            self.end()
            return
        before_step()
        self._open = watched
        self._why = self._why or watched.changed_outside() or watched.hooked_elsewhere() or watched.unrepeatable()
        if (args[1] if len(args) > 1 else named.get("closure")) is not None:
            self._why = self._why or f"{type(optimizer).__name__} was given a closure, which computes the gradients"
        if not self._why:
            self._begun, self._why = watched.begin(optimizer, self._sources)

    def _post(self, optimizer: torch.optim.Optimizer, _: object, __: object) -> None:
        if self._is_muted or self._open is None:
            return
        if self._depth:
            self._depth -= 1
            return
        self._open.note()
        if not self._why and self._begun is not None:
            self._end(optimizer, self._open, self._begun)
        self._begun = self._open = None  # last: until here, an interrupt leaves a step that did not end

    def _end(self, optimizer: torch.optim.Optimizer, watched: _Watched, begun: _Begun) -> None:
        """Keep what the step was made of, if it can be made again."""
        act = begun.act
        if [tensor._version for tensor in begun.tensors] != begun.versions and not watched.copies_always:
            watched.copies_always = True  # from the next step on
            if any(one.version is not None for one in act.gradients):
                self._why = f"{type(optimizer).__name__} changes gradients in its step"
        drew = not torch.equal(cast("torch.Tensor", act.generator), torch.get_rng_state())
        for device, state in begun.generators.items():
            if not torch.equal(state, device_generator(device)):
                self._why = self._why or f"{type(optimizer).__name__} draws from the generator of {device}"
        self._keep(msgspec.structs.replace(
            act, generator=act.generator if drew else None, seconds=monotonic() - begun.at
        ))

    def _keep(self, act: Act) -> None:
        """Keep an act until it is taken, as long as there is room for what it keeps alive."""
        self._gradient_bytes += act.gradient_bytes
        if not self._why and self._gradient_bytes <= self._room_bytes:
            self._acts.append(act)
            return
        if not self._why:
            self._why = (
                f"the gradients of {len(self._acts) + 1} steps without a save take {self._gradient_bytes} bytes, and "
                f"{self._room_bytes} may be kept"
            )
        for one in (*self._acts, act):
            one.copies()
        self._acts = []


class _Watched:
    """One optimizer."""

    def __init__(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        self.number, self._optimizer, self.kind = number, weakref.ref(optimizer), type(optimizer).__name__
        self._parameters = stepped_parameters(optimizer)
        self._ids = _ids_of(optimizer)
        self._hooks: list[Any] = []
        self._storages: dict[int, StorageWeakRef] = {}  # of the last step's gradients
        self._pool: deque[dict[int, torch.Tensor]] = deque()
        self.copies_always = self._is_captured = False
        self._seed = 0
        self._seen = Seen.of((), 0)
        self.note()

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._optimizer() is optimizer and _ids_of(optimizer) == self._ids

    def put_around(self, pre: Callable[..., None], post: Callable[..., None]) -> None:
        """Register the hooks next to the step itself: others', before it, may change gradients; those behind it may
        change what it has made.
        """
        optimizer = self._optimizer()
        assert optimizer is not None, "the caller holds it"
        if self._hooks and not self.hooked_elsewhere():
            return
        self.let_go()
        self._hooks = [
            optimizer.register_step_pre_hook(own_hook(partial(pre, self.number))),
            optimizer.register_step_post_hook(own_hook(post)),
        ]
        behind = cast("OrderedDict[int, object]", optimizer._optimizer_step_post_hooks)
        behind.move_to_end(self._hooks[1].id, last=False)

    def hooked_elsewhere(self) -> str:
        """Whether hooks of others come between these and the step, and which; "" if none do."""
        optimizer = self._optimizer()
        if optimizer is None or not self._hooks:
            return ""
        before = reversed(optimizer._optimizer_step_pre_hooks.items())
        behind = iter(optimizer._optimizer_step_post_hooks.items())
        for hooks, own, where in ((before, self._hooks[0].id, "before"), (behind, self._hooks[1].id, "after")):
            for number, hook in hooks:
                if number == own:
                    break
                if not is_own_hook(hook):
                    return f"a hook was put {where} the step of {self.kind} since the last save"
            else:
                return f"the hooks {where} the step of {self.kind} were removed"
        return ""

    def let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def unrepeatable(self) -> str:
        """Why the step that begins cannot be made again by a call of the optimizer's method; "" if it can."""
        if any(one.is_cuda for one in self._parameters) and torch.cuda.is_current_stream_capturing():
            self._is_captured = True
        return f"the step of {self.kind} is compiled" if _compiled() else self._captured()

    def _captured(self) -> str:
        return f"the step of {self.kind} is in a captured graph, which calls no hooks" if self._is_captured else ""

    def note(self) -> None:
        """Note its parameters and its state, as they are now."""
        optimizer = self._optimizer()
        slots, self._numbers = ([], []) if optimizer is None else slots_of(optimizer)
        self._seed += 1  # so that lines that are not sampled now are at another time
        self._seen = Seen.of([*self._parameters, *slots], self._seed, self._seen)
        self._slot_refs = [weakref.ref(one) for one in slots]

    def changed_outside(self) -> str:
        """What has changed since its last step; "" if nothing has, as far as addresses, counters and samples tell."""
        optimizer = self._optimizer()
        is_told = optimizer is not None and not self._is_captured
        slots, numbers = slots_of(optimizer) if optimizer is not None and is_told else ([], [])
        same = len(slots) == len(self._slot_refs) and len(numbers) == len(self._numbers)
        same = same and all(one is known() for one, known in zip(slots, self._slot_refs, strict=True))
        changed = self._seen.first_changed([*self._parameters, *slots] if same else self._parameters)
        if changed is not None and changed < len(self._parameters):
            return f"parameter {changed} of {self.kind} was changed between steps, and not by its optimizer"
        if not is_told:
            return self._captured()
        same = same and changed is None and all(map(_is_same, numbers, self._numbers))
        return "" if same else f"the state of {self.kind} was changed between steps, and not by its step"

    def begin(
        self, optimizer: torch.optim.Optimizer, sources: Sequence[CompressedGradients]
    ) -> tuple[_Begun | None, str]:
        """Note what the step is about to use."""
        gradients: list[tuple[int, torch.Tensor]] = []
        for at, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            gradient = parameter.grad
            if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
                if cannot := _undivided(parameter, gradient):
                    return None, f"the gradient of parameter {at} of {type(optimizer).__name__} is not {cannot}"
                gradient = local(gradient)
            elif is_dtensor(parameter):
                return None, f"the gradient of parameter {at} of {type(optimizer).__name__} is not a dense tensor"
            gradients.append((at, gradient.detach()))
        try:
            options = tuple([
                objects.encode_text(_plain(group), f"param_groups.{at}")
                for at, group in enumerate(optimizer.param_groups)
            ])
        except UnsupportedStateError as error:
            return None, error.message
        compressed, why = compress(sources, self._parameters, dict(gradients)) if sources else ((), "")
        done = {at for one in compressed for at, _ in one.parameters}
        gradients = [one for one in gradients if one[0] not in done] if done else gradients
        scale, inf = (_number(getattr(optimizer, name, None)) for name in ("grad_scale", "found_inf"))
        tensors = [tensor for _, tensor in gradients]
        versions = [tensor._version for tensor in tensors]
        noted, give_back = self._noted(gradients, copies=self.copies_always or scale is not None)
        act = Act(
            self.number, options, noted, torch.get_rng_state(), scale, inf, 0.0, give_back, self.copy_always,
            compressed, why,
        )
        return _Begun(monotonic(), act, tensors, versions, self._device_generators()), ""

    def copy_always(self) -> None:
        self.copies_always = True

    def _device_generators(self) -> dict[torch.device, torch.Tensor]:
        """The states of the generators of its parameters' devices."""
        devices = {local(one).device for one in self._parameters}
        return {one: device_generator(one) for one in devices if one.type not in ("cpu", "meta")}

    def _noted(
        self, gradients: Sequence[tuple[int, torch.Tensor]], *, copies: bool
    ) -> tuple[tuple[Gradient, ...], Callable[[], None]]:
        """The gradients, kept alive or copied; and a function that gives the copies' memory back."""
        pool = self._pool.popleft() if self._pool else {}
        before, self._storages = self._storages, {}
        noted, used = [], False
        for at, tensor in gradients:
            storage = tensor.untyped_storage()
            known = before.get(at)
            # A storage that is gone may have had the same address; one that is there still is the same.
            reused = known is None or (known.cdata == storage._cdata and not known.expired())  # type: ignore[no-untyped-call]
            self._storages[at] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            if copies or reused or not _is_dense(tensor):
                copy = pool.get(at)
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = pool[at] = torch.empty_like(tensor)
                noted.append(Gradient(at, copy.copy_(tensor), None))
                used = True
            else:
                noted.append(Gradient(at, tensor, tensor._version))
        if not used:
            return tuple(noted), _nothing  # the pool goes: from now on the loop lets go of its gradients
        return tuple(noted), lambda: self._pool.append(pool)


def _undivided(parameter: torch.Tensor, gradient: torch.Tensor) -> str:
    """What a gradient would have to be for this rank's part of it to be a dense tensor; "" if it is that."""
    if local(gradient).layout is not torch.strided or is_dtensor(gradient) != is_dtensor(parameter):
        return "a dense tensor"
    if is_dtensor(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        return "placed as it is"
    return ""


def device_generator(device: torch.device) -> torch.Tensor:
    """The state of a device's generator; empty for a device that has none."""
    try:
        return cast("torch.Tensor", torch.get_device_module(device).get_rng_state(device))
    except (RuntimeError, AttributeError):
        return torch.empty(0)


def _compiled() -> bool:
    """Whether compiled code steps: a replay would call the optimizer's method, whose kernels are others."""
    frame: FrameType | None = sys._getframe(3)  # behind the wrapper that calls a hook as it is
    while frame is not None:
        if frame.f_code.co_name == _COMPILED and frame.f_code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


def _ids_of(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Its parameters, by group."""
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _is_same(one: object, other: object) -> bool:
    """Of values of an optimizer's state that are no tensors. Objects that may change in place are not looked into."""
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str | bytes) and one == other)


def _nothing() -> None: ...


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one run of memory, in whichever order."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _plain(group: Mapping[str, object]) -> dict[str, object]:
    """A group's settings; a tensor that is one number (the learning rate of a captured step, a beta) is that number."""
    return {key: _setting(value) for key, value in group.items() if key not in _NOT_OPTIONS}


def _setting(value: object) -> object:
    if type(value) in (tuple, list):
        return cast("Any", type(value))(map(_setting, cast("Any", value)))
    return _number(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _number(value: object) -> float | None:
    return None if value is None else float(cast("Any", value))
