"""A communication hook of DistributedDataParallel that exchanges gradients compressed, with error feedback.

    gradient + residual --compress--> what is sent --all_gather--> what all ranks sent --decompress--> the gradient
                             what is not sent is the residual of the next step

All ranks decompress the same bytes in the same order, so they apply bit-equal gradients. What all ranks sent is what a
journal logs (flowstone.CompressedGradients).
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
from flowstone.state.compressed import CompressedBucket

_SENT = "sent"
_TOLD = 16  # elements of a bucket that are looked at once more before the optimizer steps


class Compression(ABC):
    """Exchanges the gradients of one model in a compressed form.

    One thread at a time, but for `decompress`. The residual is in the state_dict: one for each rank, by parameter.
    """

    def __init__(self, model: torch.nn.Module, *, error_feedback: bool) -> None:
        is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self._group = cast("Any", model).process_group if is_ddp else None
        named = (cast("Any", model).module if is_ddp else model).named_parameters()
        self._parameters = {name: one for name, one in named if one.requires_grad}
        dtypes = {one.dtype for one in self._parameters.values()}
        if len(dtypes) != 1 or not all(one.is_floating_point for one in dtypes):
            raise ArgumentError(
                "compressed gradients: the parameters are not of one floating point dtype",
                found=", ".join(sorted(map(str, dtypes))) or "no parameter that has a gradient",
                next="convert the model, or leave the gradients as they are",
            )
        (self._dtype,) = dtypes
        self._rank = dist.get_rank(self._group) if dist.is_initialized() else 0
        self._residual: dict[str, torch.Tensor] = {}
        if error_feedback:
            self._residual = {
                name: torch.zeros(one.numel(), dtype=one.dtype, device=one.device)
                for name, one in self._parameters.items()
            }
        self._names = {id(one): name for name, one in self._parameters.items()}
        self._buckets: list[CompressedBucket] = []
        self._ended: _Ended | None = None

    # What a journal asks

    @property
    @abstractmethod
    def kind(self) -> str:
        """Names the way of decompression."""

    @property
    def exact(self) -> bool:
        """Whether nothing of this is lost by a replay: there is no residual."""
        return not self._residual

    def compressed(self) -> Sequence[CompressedBucket]:
        """The buckets of the last exchange."""
        return self._buckets

    def decompress(self, tensors: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        """The mean of what all ranks sent, added in the order of ranks."""
        sent = tensors[_SENT]
        flat = torch.zeros(length, dtype=self._dtype, device=sent.device)
        for row in sent:
            self._add(flat, row, tensors)
        return flat.div_(len(sent))

    @abstractmethod
    def replayed(self, bucket: CompressedBucket) -> None:
        """Bring the residual near to what it was after a step with this bucket."""

    def state_dict(self) -> dict[str, object]:
        return {"residual": dict(self._residual)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over a residual; its tensors are copied. ValueError if it is of other parameters."""
        residual = cast("Mapping[str, torch.Tensor]", state["residual"])
        shapes = {name: tuple(one.shape) for name, one in residual.items()}
        if shapes != {name: tuple(one.shape) for name, one in self._residual.items()}:
            raise ValueError("the residual is of other parameters, or only one of both has error feedback")
        for name, one in residual.items():
            self._residual[name].copy_(one)

    # What a subclass does with one bucket

    @abstractmethod
    def _take(self, flat: torch.Tensor, begins: Sequence[int]) -> tuple[torch.Tensor, bool]:
        """What to send of a bucket, as bytes: as many on all ranks. Takes that away from `flat`.

        begins   of the parameters' gradients in `flat`, ascending. What is sent of one does not depend on the others:
                 the first step of a process has other buckets than those that follow
        returns  the second is False if not all of it is finite
        """

    def _besides(self, begins: Sequence[int]) -> dict[str, torch.Tensor]:
        """What `decompress` needs besides what was sent, on the host."""
        return {}

    @abstractmethod
    def _add(self, flat: torch.Tensor, sent: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add to `flat` what one rank sent. `tensors`: of the bucket."""

    @abstractmethod
    def _telling(self, flat: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """Positions in a decompressed bucket, some of those with the largest elements."""

    # The hook

    def exchange(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Send a bucket of local gradients, and give DDP the mean of all ranks."""
        flat, parameters = bucket.buffer(), bucket.parameters()
        offsets = [one.storage_offset() - flat.storage_offset() for one in bucket.gradients()]
        if bucket.index() == 0:
            self._buckets, self._ended = [], _Ended()
        ended = self._ended
        assert ended is not None, "bucket 0 comes first"
        residual = [self._residual[self._names[id(one)]] for one in parameters] if self._residual else []
        if residual:
            parts = [flat[begin : begin + len(own)] for begin, own in zip(offsets, residual, strict=True)]
            torch._foreach_add_(parts, residual)
        mine, is_finite = self._take(flat, sorted(offsets))
        if residual and is_finite:  # a step with an infinite gradient is skipped, and leaves the residual as it was
            torch._foreach_copy_(residual, parts)
        group = self._group if self._group is not None else dist.group.WORLD
        sent = torch.empty((dist.get_world_size(group), len(mine)), dtype=torch.uint8, device=mine.device)
        work = dist.all_gather(list(sent.unbind()), mine, group=group, async_op=True)
        marks = _Marks(parameters, offsets)
        checks = flat.device.type == "cpu"
        tensors = {_SENT: sent, **self._besides(sorted(offsets))}
        self._buckets.append(CompressedBucket(
            parameters, offsets, len(flat), tensors, marks.hold if checks else None
        ))
        ended.marks.append(marks)
        if bucket.is_last() and checks:
            # DDP sets gradients in a callback of its own, behind this one; what is queued there comes after.
            _at_end(partial(_at_end, ended.note))
        applied = cast("Any", work).get_future().then(partial(self._applied, tensors, len(flat), marks))
        return cast("torch.futures.Future[torch.Tensor]", applied)

    def _applied(
        self, tensors: Mapping[str, torch.Tensor], length: int, marks: _Marks, exchanged: torch.futures.Future[object]
    ) -> torch.Tensor:
        """On a thread of the process group, once all ranks have sent. Raises what an exchange that failed did."""
        exchanged.value()
        flat = self.decompress(tensors, length)
        told = self._telling(flat, tensors[_SENT][0])
        marks.told = list(zip(told.tolist(), flat[told].view(torch.uint8).view(len(told), -1), strict=True))
        return flat


def exchange(compression: Compression, bucket):  # type: ignore[no-untyped-def]
    """The hook: `model.register_comm_hook(compression, exchange)`. DDP refuses annotations that are text."""
    return compression.exchange(bucket)


class _Ended:
    """Notes what the gradients are once a backward pass has ended."""

    def __init__(self) -> None:
        self.marks: list[_Marks] = []

    def note(self) -> None:
        for one in self.marks:
            one.note()


class _Marks:
    """Tells whether the gradients of a bucket are still those that the exchange has made.

    told  of a few elements the position in the bucket, and the bytes
    """

    def __init__(self, parameters: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        self._parameters, self._offsets = parameters, list(offsets)
        self._known: list[tuple[weakref.ref[torch.Tensor], int] | None] | None = None
        self.told: list[tuple[int, torch.Tensor]] = []

    def note(self) -> None:
        """The gradients are those of the exchange now."""
        self._known = [
            None if one.grad is None else (weakref.ref(one.grad), one.grad._version) for one in self._parameters
        ]

    def hold(self) -> bool:
        """Version counters tell of all but what was done through `.data`; the elements that were told, of most of that.
        """
        if self._known is None:
            return False
        for parameter, known in zip(self._parameters, self._known, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if known is None or known[0]() is not gradient or known[1] != gradient._version:
                return False
        order = sorted(range(len(self._offsets)), key=self._offsets.__getitem__)
        begins = [self._offsets[at] for at in order]
        for position, expected in self.told:
            at = order[bisect_right(begins, position) - 1]
            gradient, within = self._parameters[at].grad, position - self._offsets[at]
            if gradient is None or within >= gradient.numel():
                continue
            width = gradient.element_size()
            if ctypes.string_at(gradient.data_ptr() + within * width, width) != bytes(expected.tolist()):
                return False
        return True


def _at_end(act: Any) -> None:
    """Call `act` once the backward pass that is under way has ended, behind what was queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(act)
