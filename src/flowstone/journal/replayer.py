"""Replay optimizer steps: the state's optimizers step again, with gradients and settings from a journal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import torch

from flowstone.errors import DamagedError, FlowstoneError
from flowstone.format import objects
from flowstone.journal.journal_format import CompressedRow, OptimizerStepRow, StepRow, TensorRow
from flowstone.table.dtype import DTYPES
from flowstone.torch.compressed import CompressedBucket, CompressedGradients, gradient_in
from flowstone.torch.shards import is_dtensor
from flowstone.torch.stepped_tensors import addresses_of, local_tensor, stepped_parameters
from flowstone.torch.tensors import torch_dtype

# how many elements a step's buckets may have, as a multiple of the parameters' elements: buckets are padded
_PADDED_MAX = 2


class BorrowedGradients(msgspec.Struct, frozen=True, eq=False):
    """The gradients of an optimizer step that other ranks have logged.

    gradients  position of the parameter -> the description of the gradient, and the payload with its bytes
    buckets    compressed buckets, which number sources and parameters as this rank does; for each, the descriptions of
               the tensors in its frame, and the frame's payload
    """

    gradients: Mapping[int, tuple[TensorRow, memoryview]] = {}
    buckets: Sequence[tuple[CompressedRow, Sequence[TensorRow], memoryview]] = ()


class Replayer:
    """Repeats steps of a state's optimizers. The state must be that of the previous step."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._parameters = [stepped_parameters(optimizer) for optimizer in optimizers]

    def addresses(self) -> list[int]:
        """Addresses of the memory that steps change. The list may differ after a step, since steps can create and
        replace tensors.
        """
        return addresses_of(self._optimizers)

    @contextmanager
    def stepping(self, threads: int) -> Iterator[None]:
        """Context of replayed steps: torch uses as many threads as in training; its generator is restored at the end.

        The number of threads matters: they divide a tensor, and kernels may compute the last elements of each part
        differently.
        """
        generator, thread_count = torch.get_rng_state(), torch.get_num_threads()
        gradients = [[parameter.grad for parameter in parameters] for parameters in self._parameters]
        torch.set_num_threads(min(threads, 1024))
        try:
            yield
        finally:
            torch.set_num_threads(thread_count)
            torch.set_rng_state(generator)
            for parameters, own_gradients in zip(self._parameters, gradients, strict=True):
                for parameter, gradient in zip(parameters, own_gradients, strict=True):
                    parameter.grad = gradient

    def apply(
        self, row: StepRow, payload: memoryview, path: str, borrowed: Sequence[BorrowedGradients] = (),
        sources: Sequence[CompressedGradients] = (),
    ) -> None:
        """Repeat the optimizer steps of a training step, in order. Gradients are read in `payload`, so optimizers that
        change gradients change `payload`.

        borrowed  for each optimizer step, the gradients in other ranks' files; () if all are in this rank's file
        sources   sources of compressed gradients, by their numbers in the step's journal
        raises  DamagedError if the gradients do not fit the optimizers; earlier optimizer steps may have been applied
        """
        for index, act in enumerate(row.acts):
            if not 0 <= act.optimizer < len(self._optimizers):
                raise _unfit(path, f"optimizer {act.optimizer}", f"{len(self._optimizers)} optimizers")
            try:
                others = borrowed[index] if borrowed else BorrowedGradients()
                own = {parameter: (row.tensors[number], payload) for parameter, number in act.gradients}
                buckets = [(bucket, row.tensors, payload) for bucket in act.compressed]
                logged = BorrowedGradients({**others.gradients, **own}, [*others.buckets, *buckets])
                self._act(act, logged, sources, row.tensors, payload, path)
            except (FlowstoneError, MemoryError):
                raise
            except Exception as error:  # torch gets sizes, settings and generator states from a file
                raise _unfit(path, f"{type(error).__name__}: {error!s:.300}", "valid arguments of a step") from error

    def _act(
        self, act: OptimizerStepRow, logged: BorrowedGradients, sources: Sequence[CompressedGradients],
        tensors: Sequence[TensorRow], payload: memoryview, path: str,
    ) -> None:
        optimizer, parameters = self._optimizers[act.optimizer], self._parameters[act.optimizer]
        gradients: dict[int, torch.Tensor] = {}
        for index, (tensor, place) in logged.gradients.items():
            if not 0 <= index < len(parameters):
                raise _unfit(path, f"parameter {index}", f"{len(parameters)} parameters")
            gradients[index] = _gradient(parameters[index], tensor, place, path)
        decompressed = sum(row.length for row, _, _ in logged.buckets)
        possible = sum(parameter.numel() for parameter in parameters)
        if decompressed > _PADDED_MAX * possible:
            raise _unfit(path, f"buckets of {decompressed} elements", f"gradients of {possible}")
        buckets = [
            (source, _decompress(source, row, rows, place, parameters, gradients, path))
            for row, rows, place in logged.buckets
            for source in [sources[row.source] if row.source < len(sources) else None]
        ]
        if act.options is not None:
            self._set_options(optimizer, act, path)
        if act.generator is not None:
            torch.set_rng_state(_tensor(tensors[act.generator], payload).clone())
        for index, parameter in enumerate(parameters):
            parameter.grad = gradients.get(index)
        scaled = {"grad_scale": act.grad_scale, "found_inf": act.found_inf}
        device = local_tensor(parameters[0]).device if parameters else "cpu"
        for name, number_of in scaled.items():
            if number_of is not None:
                setattr(optimizer, name, torch.full((), number_of, dtype=torch.float32, device=device))
        try:
            # The method of the optimizer's class, without torch's wrapper: the user's step hooks run in training only.
            step = type(optimizer).step
            getattr(step, "__wrapped__", step)(optimizer)
        finally:
            for name, number_of in scaled.items():
                if number_of is not None:
                    delattr(optimizer, name)
        for source, bucket in buckets:
            if source is not None and not source.exact:
                source.replayed(bucket)

    def _set_options(self, optimizer: torch.optim.Optimizer, act: OptimizerStepRow, path: str) -> None:
        groups = optimizer.param_groups
        assert act.options is not None, "checked by the caller"
        if len(act.options) != len(groups):
            raise _unfit(path, f"{len(act.options)} groups", f"{len(groups)} groups")
        for i, (group, text) in enumerate(zip(groups, act.options, strict=True)):
            options = objects.decode_text(text, f"{path}: param_groups.{i}")
            if not isinstance(options, dict) or any(key not in group for key in options):
                raise _unfit(path, "settings that the optimizer does not have", "its own settings")
            for key, value in options.items():
                group[key] = _set(group[key], value)


def _decompress(
    source: CompressedGradients | None, row: CompressedRow, tensors: Sequence[TensorRow], payload: memoryview,
    parameters: Sequence[torch.Tensor], gradients: dict[int, torch.Tensor], path: str,
) -> CompressedBucket:
    """Decompress a bucket, and add its gradients to `gradients`."""
    members = [(parameters[index], offset) for index, offset in row.parameters if index < len(parameters)]
    reach = max((parameter.numel() + offset for parameter, offset in members), default=0)
    possible = members and len(members) == len(row.parameters)
    if source is None or not possible or not reach <= row.length <= sum(parameter.numel() for parameter in parameters):
        raise _unfit(path, f"a bucket of {row.length} elements", "a bucket of this optimizer's parameters")
    device = members[0][0].device
    content = {name: _tensor(tensors[index], payload).to(device) for name, index in row.tensors.items()}
    flat = source.decompress(content, row.length)
    if flat.shape != (row.length,):
        raise _unfit(path, f"a bucket that decompresses to {tuple(flat.shape)}", f"{row.length} elements")
    flat = flat if row.scale is None else flat * row.scale
    for (index, _), (parameter, offset) in zip(row.parameters, members, strict=True):
        gradients[index] = gradient_in(flat, parameter, offset)
    return CompressedBucket(
        [parameter for parameter, _ in members], [offset for _, offset in members], row.length, content
    )


def _set(own: object, value: object) -> object:
    """The current setting `own`, changed to the numbers of `value`. Tensors keep their memory, also in tuples and
    lists.
    """
    if isinstance(own, torch.Tensor):
        with torch.no_grad():
            return own.fill_(cast("float", value))
    if isinstance(own, tuple | list) and type(own) is type(value) and len(own) == len(cast("Any", value)):
        return cast("Any", type(own))(map(_set, own, cast("Any", value)))
    return value


def _tensor(row: TensorRow, payload: memoryview) -> torch.Tensor:
    dtype = torch_dtype(DTYPES[row.dtype])
    if not row.bytes:
        return torch.empty(row.shape, dtype=dtype)
    flat = torch.frombuffer(payload[row.offset : row.offset + row.bytes], dtype=torch.uint8).view(dtype)
    return flat.view(row.shape) if row.stride is None else flat.as_strided(row.shape, row.stride)


def _gradient(parameter: torch.Tensor, row: TensorRow, payload: memoryview, path: str) -> torch.Tensor:
    own = local_tensor(parameter)
    if tuple(own.shape) != row.shape:
        raise _unfit(path, f"a gradient of shape {row.shape}", f"shape {tuple(own.shape)}")
    gradient = _tensor(row, payload).to(own.device)
    if not is_dtensor(parameter):
        return gradient
    like = cast("Any", parameter)
    return cast("torch.Tensor", type(like).from_local(
        gradient, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ))


def _unfit(path: str, actual: str, expected: str) -> DamagedError:
    return DamagedError(
        f"{path} does not fit the optimizers of this state", expected=expected, found=actual,
        next="call load(step=...) with the step of the full checkpoint that precedes the journal",
    )
