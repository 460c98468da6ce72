"""Optimizer steps as they happen: hooks around each step note what would replay it.

Gradients are not copied where they rest after the step: the loop lets go of them, and makes new ones. A loop that keeps
their memory (`zero_grad(set_to_none=False)`, buckets of DDP) is recognised by it, and gets copies into memory that is
used again; so does the first step, of which that is not known yet, and an optimizer that changes gradients itself.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, cast

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flowstone.errors import UnsupportedStateError
from flowstone.format import objects
from flowstone.stage.compressed_gradients import Compressed, compress
from flowstone.state.compressed import CompressedGradients
from flowstone.state.shards import is_dtensor
from flowstone.state.stepped import local, stepped_parameters
from flowstone.state.tensors import versions_of

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
    """A step that has begun. `tensors`: the gradients themselves, where they were copied."""

    at: float
    act: Act
    tensors: list[torch.Tensor]
    versions: list[int]


class StepRecorder:
    """The hooks of one Checkpointer on the optimizers of its state.

    before_step  a bound method that is called before each step; held weakly, so that hooks keep nothing alive
    """

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._before_step = weakref.WeakMethod(before_step)
        self._watched: list[_Watched] = []
        self._sources: tuple[CompressedGradients, ...] = ()
        self._acts: list[Act] = []
        self._why = ""
        self._is_muted = False
        self._open: _Watched | None = None
        self._begun: _Begun | None = None
        self._depth = 0  # of steps inside of the open one

    def watch(
        self, optimizers: Sequence[torch.optim.Optimizer], sources: Sequence[CompressedGradients] = ()
    ) -> bool:
        """Note the steps of these, and of no others. Returns whether they were watched before, with these parameters.

        sources  of their gradients, where these are exchanged compressed
        """
        self._sources = tuple(sources)
        known = [one.is_of(optimizer) for one, optimizer in zip(self._watched, optimizers, strict=False)]
        same = len(self._watched) == len(optimizers) and all(known)
        if not same:
            self.end()
            self._watched = [_Watched(number, one) for number, one in enumerate(optimizers)]
        for one in self._watched:
            one.put_last(self._pre, self._post)
        return same

    def reset(self) -> None:
        """Forget the steps so far: the state is known as it is now."""
        self._acts, self._why, self._open, self._depth = [], "", None, 0
        for one in self._watched:
            one.note_versions()

    def mute(self, *, on: bool) -> None:
        """While on, steps are not noted: they are replays."""
        self._is_muted = on

    def take(self) -> tuple[list[Act], str]:
        """The steps since the last call; and why they do not explain the state, "" if they do."""
        why = self._why or ("a step of an optimizer did not end" if self._open is not None else "")
        for one in self._watched:
            why = why or one.changed_outside()
        acts = self._acts
        self.reset()
        return acts, why

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
        self._why = self._why or watched.changed_outside()
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
        watched, begun, self._open, self._begun = self._open, self._begun, None, None
        watched.note_versions()
        if self._why or begun is None:
            return
        act = begun.act
        if [tensor._version for tensor in begun.tensors] != begun.versions and not watched.copies_always:
            watched.copies_always = True  # from the next step on
            if any(one.version is not None for one in act.gradients):
                self._why = f"{type(optimizer).__name__} changes gradients in its step"
        drew = not torch.equal(cast("torch.Tensor", act.generator), torch.get_rng_state())
        self._acts.append(msgspec.structs.replace(
            act, generator=act.generator if drew else None, seconds=monotonic() - begun.at
        ))


class _Watched:
    """One optimizer."""

    def __init__(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        self.number, self._optimizer = number, weakref.ref(optimizer)
        self._parameters = stepped_parameters(optimizer)
        self._ids = list(map(id, self._parameters))
        self._hooks: list[Any] = []
        self._storages: dict[int, StorageWeakRef] = {}  # of the last step's gradients
        self._pool: deque[dict[int, torch.Tensor]] = deque()
        self.copies_always = False
        self.note_versions()

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._optimizer() is optimizer and list(map(id, stepped_parameters(optimizer))) == self._ids

    def put_last(self, pre: Callable[..., None], post: Callable[..., None]) -> None:
        """Register the hooks behind all others, which may change gradients too."""
        optimizer, number = self._optimizer(), self.number
        assert optimizer is not None, "the caller holds it"
        registered = optimizer._optimizer_step_pre_hooks
        if self._hooks and next(reversed(registered)) == self._hooks[0].id:
            return
        self.let_go()
        self._hooks = [
            optimizer.register_step_pre_hook(torch.compiler.disable(partial(pre, number))),  # type: ignore[no-untyped-call]
            optimizer.register_step_post_hook(torch.compiler.disable(post)),  # type: ignore[no-untyped-call]
        ]

    def let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def note_versions(self) -> None:
        self._versions = versions_of([local(one) for one in self._parameters])

    def changed_outside(self) -> str:
        """Which parameter has changed since its last step; "" if none has, as far as version counters tell."""
        now = versions_of([local(one) for one in self._parameters])
        moved = (now != self._versions).nonzero()[0]
        if not len(moved):
            return ""
        kind = type(self._optimizer()).__name__
        return f"parameter {int(moved[0])} of {kind} was changed between steps, and not by its optimizer"

    def begin(
        self, optimizer: torch.optim.Optimizer, sources: Sequence[CompressedGradients]
    ) -> tuple[_Begun | None, str]:
        """Note what the step is about to use."""
        gradients: list[tuple[int, torch.Tensor]] = []
        for at, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            gradient = local(parameter.grad)
            if gradient.layout is not torch.strided or is_dtensor(parameter.grad) != is_dtensor(parameter):
                return None, f"the gradient of parameter {at} of {type(optimizer).__name__} is not a dense tensor"
            if is_dtensor(parameter) and parameter.grad.placements != parameter.placements:  # type: ignore[attr-defined]
                return None, f"the gradient of parameter {at} of {type(optimizer).__name__} is not placed as it is"
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
        act = Act(self.number, options, noted, torch.get_rng_state(), scale, inf, 0.0, give_back, compressed, why)
        return _Begun(monotonic(), act, tensors, versions), ""

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


def _nothing() -> None: ...


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one run of memory, in whichever order."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _plain(group: Mapping[str, object]) -> dict[str, object]:
    """A group's settings; a tensor that is one number (the learning rate of a captured step) is that number."""
    return {
        key: _number(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in group.items() if key not in _NOT_OPTIONS
    }


def _number(value: object) -> float | None:
    return None if value is None else float(cast("Any", value))
