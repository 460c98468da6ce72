"""A communication hook of DistributedDataParallel that exchanges gradients in compressed form, with error feedback.

    gradient + residual --compress--> payload --all_gather--> payloads of all ranks --decompress--> the gradient
                             the uncompressed rest is the residual, which is added to the next gradient

All ranks decompress the same bytes in the same order, so they apply bit-equal gradients. A journal logs the payloads
of all ranks (flowstone.CompressedGradients).
"""

from __future__ import annotations

import ctypes
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from flowstone.errors import ArgumentError
from flowstone.torch.compressed import CompressedBucket

_SENT = "sent"
_SAMPLES = 16  # how many elements of a bucket are compared again before the optimizer's step


class Compression(ABC):
    """Exchanges the gradients of one model in a compressed form.

    For one thread at a time, except `decompress`. The state_dict has this rank's residual (the part of its gradients
    that was not sent yet), by parameter.
    """

    def __init__(self, model: torch.nn.Module, *, error_feedback: bool) -> None:
        is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self._group = cast("Any", model).process_group if is_ddp else None
        named = (cast("Any", model).module if is_ddp else model).named_parameters()
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        dtypes = {parameter.dtype for parameter in self._parameters.values()}
        if len(dtypes) != 1 or not all(dtype.is_floating_point for dtype in dtypes):
            raise ArgumentError(
                "compressed gradients need parameters of a single floating-point dtype",
                found=", ".join(sorted(map(str, dtypes))) or "no parameter that has a gradient",
                next="convert the model to one dtype, or do not compress its gradients",
            )
        (self._dtype,) = dtypes
        self._rank = dist.get_rank(self._group) if dist.is_initialized() else 0
        self._residual: dict[str, torch.Tensor] = {}
        if error_feedback:
            self._residual = {
                name: torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
                for name, parameter in self._parameters.items()
            }
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._buckets: list[CompressedBucket] = []
        self._recorder: _GradientRecorder | None = None

    # The interface that a journal uses

    @property
    @abstractmethod
    def kind(self) -> str:
        """A text that identifies how payloads are decompressed. A journal stores it."""

    @property
    def exact(self) -> bool:
        """Whether a replay is exact. It is if there is no residual."""
        return not self._residual

    def compressed(self) -> Sequence[CompressedBucket]:
        """The buckets (groups of gradients) of the last exchange."""
        return self._buckets

    def decompress(self, tensors: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        """Decompress the payloads of all ranks, add them in the order of ranks, and return their mean."""
        sent = tensors[_SENT]
        flat = torch.zeros(length, dtype=self._dtype, device=sent.device)
        for row in sent:
            self._add_payload(flat, row, tensors)
        return flat.div_(len(sent))

    @abstractmethod
    def replayed(self, bucket: CompressedBucket) -> None:
        """Approximate this rank's residual after a replayed step with this bucket."""

    def state_dict(self) -> dict[str, object]:
        return {"residual": dict(self._residual)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the residual; its tensors are copied. Raises ValueError if it belongs to other parameters."""
        residual = cast("Mapping[str, torch.Tensor]", state["residual"])
        shapes = {name: tuple(tensor.shape) for name, tensor in residual.items()}
        if shapes != {name: tuple(tensor.shape) for name, tensor in self._residual.items()}:
            raise ValueError(
                "the saved residual belongs to other parameters, or error_feedback differs between the save and now: "
                "create the compression with the model and the error_feedback of the save"
            )
        for name, tensor in residual.items():
            self._residual[name].copy_(tensor)

    # Methods of subclasses, each for one bucket

    @abstractmethod
    def _compress(self, flat: torch.Tensor, begins: Sequence[int]) -> tuple[torch.Tensor, bool]:
        """Compress a bucket into a payload of bytes, which has the same length on all ranks. Subtract from `flat`
        what the payload represents.

        begins   offsets of the parameters' gradients in `flat`, ascending. Each gradient must be compressed
                 independently of the others, since the first step of a process has other buckets than later steps
        returns  the payload, and whether all its values are finite
        """

    def _extra_tensors(self, begins: Sequence[int]) -> dict[str, torch.Tensor]:
        """Tensors on the host that `decompress` needs besides the payloads."""
        return {}

    @abstractmethod
    def _add_payload(self, flat: torch.Tensor, sent: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Decompress one rank's payload `sent`, and add it to `flat`. `tensors`: those of `_extra_tensors`."""

    @abstractmethod
    def _sample_positions(self, flat: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """The positions of some of the largest elements in a decompressed bucket `flat`."""

    # The communication hook

    def exchange(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Send a bucket of this rank's gradients. Returns the mean of all ranks' gradients to DDP."""
        flat, parameters = bucket.buffer(), bucket.parameters()
        offsets = [gradient.storage_offset() - flat.storage_offset() for gradient in bucket.gradients()]
        if bucket.index() == 0:
            self._buckets, self._recorder = [], _GradientRecorder()
        ended = self._recorder
        assert ended is not None, "bucket 0 comes first"
        residual = [self._residual[self._names[id(parameter)]] for parameter in parameters] if self._residual else []
        if residual:
            parts = [flat[begin : begin + len(own)] for begin, own in zip(offsets, residual, strict=True)]
            torch._foreach_add_(parts, residual)
        mine, is_finite = self._compress(flat, sorted(offsets))
        if residual and is_finite:  # a step with an infinite gradient is skipped, so it must not change the residual
            torch._foreach_copy_(residual, parts)
        group = self._group if self._group is not None else dist.group.WORLD
        sent = torch.empty((dist.get_world_size(group), len(mine)), dtype=torch.uint8, device=mine.device)
        work = dist.all_gather(list(sent.unbind()), mine, group=group, async_op=True)
        marks = _BucketGradients(parameters, offsets)
        checks = flat.device.type == "cpu"
        tensors = {_SENT: sent, **self._extra_tensors(sorted(offsets))}
        self._buckets.append(CompressedBucket(
            parameters, offsets, len(flat), tensors, marks.are_unchanged if checks else None
        ))
        ended.marks.append(marks)
        if bucket.is_last() and checks:
            # DDP sets gradients in a callback that runs after this one. A callback that is queued in this one runs
            # last.
            _call_after_backward(partial(_call_after_backward, ended.record))
        applied = cast("Any", work).get_future().then(partial(self._applied, tensors, len(flat), marks))
        return cast("torch.futures.Future[torch.Tensor]", applied)

    def _applied(
        self, tensors: Mapping[str, torch.Tensor], length: int, marks: _BucketGradients,
        exchanged: torch.futures.Future[object]
    ) -> torch.Tensor:
        """Decompress all payloads, on a thread of the process group. If the exchange failed, raises its error."""
        exchanged.value()
        flat = self.decompress(tensors, length)
        sampled = self._sample_positions(flat, tensors[_SENT][0])
        marks.sample(sampled.tolist(), flat[sampled].view(torch.uint8).view(len(sampled), -1))
        return flat


def exchange(compression: Compression, bucket):  # type: ignore[no-untyped-def]
    """The communication hook: `model.register_comm_hook(compression, exchange)`. It has no annotation for `bucket`, as
    DDP rejects annotations that are strings.
    """
    return compression.exchange(bucket)


class _GradientRecorder:
    """Records the gradients of all buckets when a backward pass ends."""

    def __init__(self) -> None:
        self.marks: list[_BucketGradients] = []

    def record(self) -> None:
        for marks in self.marks:
            marks.record()


class _BucketGradients:
    """Checks whether the gradients of a bucket are still the result of its exchange."""

    def __init__(self, parameters: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        self._parameters, self._offsets = parameters, list(offsets)
        self._versions: list[tuple[weakref.ref[torch.Tensor], int] | None] | None = None
        self._samples: list[tuple[int, torch.Tensor]] = []

    def record(self) -> None:
        """Record that the gradients are now the result of the exchange."""
        self._versions = [
            None if gradient is None else (weakref.ref(gradient), gradient._version)
            for gradient in (parameter.grad for parameter in self._parameters)
        ]

    def sample(self, positions: Sequence[int], content: torch.Tensor) -> None:
        """Store a few elements of the result: their positions in the bucket, and their bytes (one row of `content` for
        each).
        """
        self._samples = list(zip(positions, content, strict=True))

    def are_unchanged(self) -> bool:
        """Whether the gradients are still those that `record` has seen. Version counters show all changes except those
        through `.data`. Most of the changes through `.data` are found by comparing the elements that `sample` stored.
        """
        if self._versions is None:
            return False
        for parameter, version in zip(self._parameters, self._versions, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if version is None or version[0]() is not gradient or version[1] != gradient._version:
                return False
        order = sorted(range(len(self._offsets)), key=self._offsets.__getitem__)
        begins = [self._offsets[index] for index in order]
        for position, expected in self._samples:
            index = order[bisect_right(begins, position) - 1]
            gradient, within = self._parameters[index].grad, position - self._offsets[index]
            if gradient is None or within >= gradient.numel():
                continue
            width = gradient.element_size()
            if ctypes.string_at(gradient.data_ptr() + within * width, width) != bytes(expected.tolist()):
                return False
        return True


def _call_after_backward(act: Any) -> None:
    """Call `act` at the end of the current backward pass, after the callbacks that were queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(act)
