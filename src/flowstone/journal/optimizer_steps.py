"""Records of optimizer steps: hooks around each step record the inputs of a replay.

Gradients are not copied if the training loop drops them after each step, and creates new ones in the next. They are
copied, into reused memory, if the loop keeps their memory (`zero_grad(set_to_none=False)`, buckets of DDP), if the
optimizer itself changes gradients, and at the first step, when the loop's behavior is not known yet.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, cast

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flowstone.errors import UnsupportedStateError
from flowstone.format import objects
from flowstone.journal.compressed_gradients import LoggedBucket, compress
from flowstone.stage.fence import is_own_hook, own_hook
from flowstone.torch.compressed import CompressedGradients
from flowstone.torch.shards import is_dtensor
from flowstone.torch.stepped_tensors import local_tensor, slots_of, stepped_parameters
from flowstone.torch.tensor_snapshot import TensorSnapshot

_COMPILED = "compile_wrapper"  # the function in torch's eval_frame.py that calls code of torch.compile
_NOT_OPTIONS = frozenset({"params", "param_names"})


class Gradient(msgspec.Struct, frozen=True, eq=False):
    """A parameter's gradient, as the optimizer read it.

    parameter  position among all parameters of the optimizer
    tensor     this rank's part of the gradient, kept alive
    version    the tensor's version counter when it was recorded; None: a copy, which does not change
    """

    parameter: int
    tensor: torch.Tensor
    version: int | None

    @property
    def is_unchanged(self) -> bool:
        return self.version is None or self.tensor._version == self.version


class OptimizerStepRecord(msgspec.Struct, frozen=True, eq=False):
    """One step of one optimizer; see journal_format.OptimizerStepRow.

    on_written    called when the gradients have been written: then the memory of copies can be reused
    on_changed    called if the loop has changed gradients after the step: later gradients are copied
    compressed    gradients that are logged in their compressed form
    uncompressed  why some gradients are not logged in compressed form; "" if all are
    """

    optimizer: int
    options: tuple[msgspec.Raw, ...]
    gradients: tuple[Gradient, ...]
    generator: torch.Tensor | None
    grad_scale: float | None
    found_inf: float | None
    seconds: float
    on_written: Callable[[], None]
    on_changed: Callable[[], None]
    compressed: tuple[LoggedBucket, ...] = ()
    uncompressed: str = ""

    @property
    def is_unchanged(self) -> bool:
        """Whether the gradients still have the values that the optimizer read, by their version counters."""
        are_gradients_unchanged = all(gradient.is_unchanged for gradient in self.gradients)
        return are_gradients_unchanged and all(bucket.is_unchanged for bucket in self.compressed)

    @property
    def compressed_parameters(self) -> list[int]:
        """The parameters whose gradients are logged in compressed form."""
        return [parameter for bucket in self.compressed for parameter, _ in bucket.parameters]

    @property
    def parameters(self) -> list[int]:
        """The parameters that had a gradient."""
        return [*(gradient.parameter for gradient in self.gradients), *self.compressed_parameters]

    @property
    def gradient_bytes(self) -> int:
        """Length of the gradients in bytes, in the form in which they are logged."""
        return sum(logged.tensor.nbytes for logged in self.gradients) + sum(logged.nbytes for logged in self.compressed)


class _OpenStep(msgspec.Struct):
    """An optimizer step that has begun, but not ended. `tensors`: the original gradients, not copies. `generators`:
    states of random generators, by device.
    """

    began: float
    record: OptimizerStepRecord
    tensors: list[torch.Tensor]
    versions: list[int]
    generators: dict[torch.device, torch.Tensor]


class StepRecorder:
    """The hooks of one Checkpointer on the optimizers of its state.

    on_step  a bound method that is called before each step; held by a weak reference, so that hooks keep no
             Checkpointer alive
    """

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = weakref.WeakMethod(on_step)
        self._watched: list[_WatchedOptimizer] = []
        self._sources: tuple[CompressedGradients, ...] = ()
        self._steps: list[OptimizerStepRecord] = []
        self._gradient_bytes, self._room_bytes = 0, 0
        self._why = ""
        self._is_muted = False
        self._open: _WatchedOptimizer | None = None
        self._begun: _OpenStep | None = None
        self._depth = 0  # how many steps are open inside the outermost one

    def watch(
        self, optimizers: Sequence[torch.optim.Optimizer], sources: Sequence[CompressedGradients] = (), *,
        room_bytes: int,
    ) -> bool:
        """Record the steps of these optimizers only. Returns whether the same optimizers, with the same parameters,
        were watched before.

        sources     sources of compressed gradients
        room_bytes  how many bytes the gradients of all recorded steps may take, until `take_steps` is called. If they
                    take more, all recorded steps are dropped
        """
        self._sources, self._room_bytes = tuple(sources), room_bytes
        are_same = [watched.is_of(optimizer) for watched, optimizer in zip(self._watched, optimizers, strict=False)]
        is_same = len(self._watched) == len(optimizers) and all(are_same)
        if not is_same:
            self.end()
            self._watched = [_WatchedOptimizer(number, watched) for number, watched in enumerate(optimizers)]
        for watched in self._watched:
            watched.install_hooks(self._pre, self._post)
        return is_same

    def reset(self) -> None:
        """Forget the steps so far: the current state is the new baseline."""
        self._forget_steps()
        for watched in self._watched:
            watched.note()

    def _forget_steps(self) -> None:
        self._steps, self._why, self._open, self._depth = [], "", None, 0
        self._gradient_bytes = 0

    def mute(self, *, on: bool) -> None:
        """Pause (`on`) or resume the recording. It is paused during replays."""
        self._is_muted = on

    def take_steps(self) -> tuple[list[OptimizerStepRecord], str]:
        """Returns the optimizer steps since the last call, and why they cannot be replayed ("" if they can)."""
        why = self._why or ("a step of an optimizer did not return" if self._open is not None else "")
        for watched in self._watched:
            why = why or watched.changed_outside()
        records = self._steps
        for record in records:
            if not record.is_unchanged:
                record.on_changed()
                kind = self._kind(record)
                why = why or f"a gradient of {kind} was changed after the step; later gradients are copied"
        self._forget_steps()
        return records, why

    def _kind(self, record: OptimizerStepRecord) -> str:
        return self._watched[record.optimizer].kind

    def end(self) -> None:
        """Remove the hooks."""
        for watched in self._watched:
            watched.remove_hooks()
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
                self._why = self._why or f"another optimizer calls the step of {type(optimizer).__name__}"
            self._depth += 1  # a step that calls its base class' step
            return
        on_step = self._on_step()
        if on_step is None:  # its Checkpointer is gone
            self.end()
            return
        on_step()
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
        # these fields are cleared last, so an interrupt before this line leaves an open step, which is noticed
        self._begun = self._open = None

    def _end(self, optimizer: torch.optim.Optimizer, watched: _WatchedOptimizer, begun: _OpenStep) -> None:
        """Keep the record of a step that has ended, if it can be replayed."""
        record = begun.record
        if [tensor._version for tensor in begun.tensors] != begun.versions and not watched.copies_always:
            watched.copy_always()  # copies from the next step on
            if any(gradient.version is not None for gradient in record.gradients):
                self._why = f"{type(optimizer).__name__} changes gradients in its step"
        drew = not torch.equal(cast("torch.Tensor", record.generator), torch.get_rng_state())
        for device, state in begun.generators.items():
            if not torch.equal(state, device_generator(device)):
                self._why = self._why or f"{type(optimizer).__name__} draws from the generator of {device}"
        self._keep(msgspec.structs.replace(
            record, generator=record.generator if drew else None, seconds=monotonic() - begun.began
        ))

    def _keep(self, record: OptimizerStepRecord) -> None:
        """Store a record until it is taken, if there is memory for its gradients."""
        self._gradient_bytes += record.gradient_bytes
        if not self._why and self._gradient_bytes <= self._room_bytes:
            self._steps.append(record)
            return
        if not self._why:
            self._why = (
                f"the gradients of {len(self._steps) + 1} steps without a save take {self._gradient_bytes} bytes, "
                f"above the limit of {self._room_bytes}"
            )
        for dropped in (*self._steps, record):
            dropped.on_written()
        self._steps = []


class _WatchedOptimizer:
    """One optimizer whose steps are recorded, and samples of its parameters and state."""

    def __init__(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        self.number, self._optimizer, self.kind = number, weakref.ref(optimizer), type(optimizer).__name__
        self._parameters = stepped_parameters(optimizer)
        self._ids = _ids_of(optimizer)
        self._hooks: list[Any] = []
        self._storages: dict[int, StorageWeakRef] = {}  # the memory of the last step's gradients
        self._pool: deque[dict[int, torch.Tensor]] = deque()
        self.copies_always = self._is_captured = False
        self._seed = 0
        self._seen = TensorSnapshot.of((), 0)
        self.note()

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._optimizer() is optimizer and _ids_of(optimizer) == self._ids

    def install_hooks(self, pre: Callable[..., None], post: Callable[..., None]) -> None:
        """Register the first hook as the last one before the step, and the second hook as the first one after the step:
        other hooks may change gradients before the step, and results after it.
        """
        optimizer = self._optimizer()
        assert optimizer is not None, "the caller holds it"
        if self._hooks and not self.hooked_elsewhere():
            return
        self.remove_hooks()
        self._hooks = [
            optimizer.register_step_pre_hook(own_hook(partial(pre, self.number))),
            optimizer.register_step_post_hook(own_hook(post)),
        ]
        behind = cast("OrderedDict[int, object]", optimizer._optimizer_step_post_hooks)
        behind.move_to_end(self._hooks[1].id, last=False)

    def hooked_elsewhere(self) -> str:
        """Why another hook now runs between these hooks and the step; "" if none does."""
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
                    return f"a hook was added {where} the step of {self.kind} since the last save"
            else:
                return f"the hooks {where} the step of {self.kind} were removed"
        return ""

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def unrepeatable(self) -> str:
        """Why a replay, which calls the optimizer's `step` method, cannot repeat the step that begins; "" if it can."""
        if any(parameter.is_cuda for parameter in self._parameters) and torch.cuda.is_current_stream_capturing():
            self._is_captured = True
        return f"the step of {self.kind} is compiled" if _compiled() else self._captured()

    def _captured(self) -> str:
        return f"the step of {self.kind} is in a captured graph, which calls no hooks" if self._is_captured else ""

    def note(self) -> None:
        """Take samples of the optimizer's current parameters and state."""
        optimizer = self._optimizer()
        slots, self._numbers = ([], []) if optimizer is None else slots_of(optimizer)
        self._seed += 1  # each call samples other cache lines
        self._seen = TensorSnapshot.of([*self._parameters, *slots], self._seed, self._seen)
        self._slot_refs = [weakref.ref(slot) for slot in slots]

    def changed_outside(self) -> str:
        """Describes a change of parameters or state since the optimizer's last step, found by addresses, version
        counters and samples; "" if there is none.
        """
        optimizer = self._optimizer()
        is_told = optimizer is not None and not self._is_captured
        slots, numbers = slots_of(optimizer) if optimizer is not None and is_told else ([], [])
        is_same = len(slots) == len(self._slot_refs) and len(numbers) == len(self._numbers)
        is_same = is_same and all(slot is ref() for slot, ref in zip(slots, self._slot_refs, strict=True))
        changed = self._seen.first_changed([*self._parameters, *slots] if is_same else self._parameters)
        if changed is not None and changed < len(self._parameters):
            return f"parameter {changed} of {self.kind} was changed between steps, but not by its optimizer"
        if not is_told:
            return self._captured()
        is_same = is_same and changed is None and all(map(_is_same, numbers, self._numbers))
        return "" if is_same else f"the state of {self.kind} was changed between steps, but not by its step"

    def begin(
        self, optimizer: torch.optim.Optimizer, sources: Sequence[CompressedGradients]
    ) -> tuple[_OpenStep | None, str]:
        """Record the inputs of the step; or return why it cannot be replayed."""
        gradients: list[tuple[int, torch.Tensor]] = []
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            gradient = parameter.grad
            if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
                if cannot := _undivided(parameter, gradient):
                    return None, f"the gradient of parameter {index} of {type(optimizer).__name__} is not {cannot}"
                gradient = local_tensor(gradient)
            elif is_dtensor(parameter):
                return None, f"the gradient of parameter {index} of {type(optimizer).__name__} is not a dense tensor"
            gradients.append((index, gradient.detach()))
        try:
            options = tuple([
                objects.encode_text(_plain(group), f"param_groups.{index}")
                for index, group in enumerate(optimizer.param_groups)
            ])
        except UnsupportedStateError as error:
            return None, error.message
        compressed, why = compress(sources, self._parameters, dict(gradients)) if sources else ((), "")
        done = {index for bucket in compressed for index, _ in bucket.parameters}
        gradients = [pair for pair in gradients if pair[0] not in done] if done else gradients
        scale, inf = (_number(getattr(optimizer, name, None)) for name in ("grad_scale", "found_inf"))
        tensors = [tensor for _, tensor in gradients]
        versions = [tensor._version for tensor in tensors]
        noted, release = self._noted(gradients, copies=self.copies_always or scale is not None)
        record = OptimizerStepRecord(
            self.number, options, noted, torch.get_rng_state(), scale, inf, 0.0, release, self.copy_always,
            compressed, why,
        )
        return _OpenStep(monotonic(), record, tensors, versions, self._device_generators()), ""

    def copy_always(self) -> None:
        self.copies_always = True

    def _device_generators(self) -> dict[torch.device, torch.Tensor]:
        """The states of the random generators of the parameters' devices."""
        devices = {local_tensor(parameter).device for parameter in self._parameters}
        return {device: device_generator(device) for device in devices if device.type not in ("cpu", "meta")}

    def _noted(
        self, gradients: Sequence[tuple[int, torch.Tensor]], *, copies: bool
    ) -> tuple[tuple[Gradient, ...], Callable[[], None]]:
        """Returns the gradients, which are kept alive or copied, and a function that releases the memory of the copies.
        """
        pool = self._pool.popleft() if self._pool else {}
        before, self._storages = self._storages, {}
        noted, used = [], False
        for index, tensor in gradients:
            storage = tensor.untyped_storage()
            last = before.get(index)
            # A new storage may have the address of a freed one. If the old one still exists, it is the same storage.
            reused = last is None or (last.cdata == storage._cdata and not last.expired())  # type: ignore[no-untyped-call]
            self._storages[index] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            if copies or reused or not _is_dense(tensor):
                copy = pool.get(index)
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = pool[index] = torch.empty_like(tensor)
                noted.append(Gradient(index, copy.copy_(tensor), None))
                used = True
            else:
                noted.append(Gradient(index, tensor, tensor._version))
        if not used:
            return tuple(noted), _nothing  # the pool of copies is dropped, since the loop now drops its gradients
        return tuple(noted), lambda: self._pool.append(pool)


def _undivided(parameter: torch.Tensor, gradient: torch.Tensor) -> str:
    """What a gradient that cannot be journaled would have to be, such as "a dense tensor", for the end of the sentence
    "the gradient is not ..."; "" if it can be journaled.
    """
    if local_tensor(gradient).layout is not torch.strided or is_dtensor(gradient) != is_dtensor(parameter):
        return "a dense tensor"
    if is_dtensor(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        return "placed like the parameter"
    return ""


def device_generator(device: torch.device) -> torch.Tensor:
    """The state of a device's generator; empty for a device that has none."""
    try:
        return cast("torch.Tensor", torch.get_device_module(device).get_rng_state(device))
    except (RuntimeError, AttributeError):
        return torch.empty(0)


def _compiled() -> bool:
    """Whether code of torch.compile runs the step. A replay could not repeat it: it calls the optimizer's own method,
    which uses other kernels.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == _COMPILED and frame.f_code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


def _ids_of(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The ids of the optimizer's parameters, by group."""
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _is_same(first: object, second: object) -> bool:
    """Whether two values of an optimizer's state, other than tensors, are equal. Mutable objects count as equal only if
    they are the same object.
    """
    is_comparable = type(first) is type(second) and isinstance(first, int | float | str | bytes)
    return first is second or (is_comparable and first == second)


def _nothing() -> None: ...


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are contiguous in memory, in any order."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _plain(group: Mapping[str, object]) -> dict[str, object]:
    """A group's settings. A tensor with one number (such as a learning rate or a beta of a step in a CUDA graph) is
    replaced by that number.
    """
    return {key: _setting(value) for key, value in group.items() if key not in _NOT_OPTIONS}


def _setting(value: object) -> object:
    if type(value) in (tuple, list):
        return cast("Any", type(value))(map(_setting, cast("Any", value)))
    return _number(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _number(value: object) -> float | None:
    return None if value is None else float(cast("Any", value))
