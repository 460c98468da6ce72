"""Compressed gradients: the tensors that training exchanges instead of gradients, and their decompression."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import torch

from flowstone.state.names import section_place
from flowstone.state.records import PerRank
from flowstone.torch.shards import is_dtensor


class CompressedBucket(msgspec.Struct, frozen=True, eq=False):
    """A bucket: the gradients of some parameters, which ranks exchange together.

    parameters  the parameters whose gradients are in the bucket
    offsets     for each parameter, where its gradient begins in the decompressed bucket, in elements. The gradient has
                the order of the parameter's memory (row-major if that has gaps)
    length      length of the decompressed bucket, in elements
    tensors     the compressed form, equal on all ranks; Flowstone does not change their memory
    is_applied  a function that is called at the optimizer's step, and returns whether the parameters still have exactly
                these gradients. None: the journal decompresses the bucket and compares all bits
    """

    parameters: Sequence[torch.Tensor]
    offsets: Sequence[int]
    length: int
    tensors: Mapping[str, torch.Tensor]
    is_applied: Callable[[], bool] | None = None


@runtime_checkable
class CompressedGradients(Protocol):
    """An object that exchanges gradients in compressed form. If the object is a section of the state, `every_step`
    journals the compressed form. Like any object of the state it has `state_dict` and `load_state_dict`.

    kind   name of the method of decompression; a replay needs an object of the same kind, in the same section
    exact  whether a replay can reproduce the object's state_dict(). If so, its tensors are journaled like those of
           other objects. If not, because it has residuals of gradients that were not sent, only full checkpoints have
           its tensors, and `replayed` approximates them
    """

    @property
    def kind(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def compressed(self) -> Sequence[CompressedBucket]:
        """The buckets of the last exchange, which produced the current gradients. Called before an optimizer's step."""

    def decompress(self, tensors: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        """The gradients of a bucket as a 1-D tensor of `length` elements. Each call must return the same bits as in
        training.

        The caller owns the result. The method must not change `tensors`.
        """

    def replayed(self, bucket: CompressedBucket) -> None:
        """Approximate the tensors of this object. Called after a load has replayed a step with this bucket, unless
        `exact` is True.

        The bucket's parameters are those of the optimizer that made the step.
        """

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: Mapping[str, object], /) -> None: ...


def find_gradient_sources(state: Mapping[str, object]) -> dict[str, CompressedGradients]:
    """The sections of a state whose value is an object that exchanges compressed gradients."""
    sources = {}
    for section, value in state.items():
        own = value.value if isinstance(value, PerRank) else value
        if not isinstance(own, type) and hasattr(own, "decompress") and isinstance(own, CompressedGradients):
            sources[section] = own
    return sources


def belongs_to(name: str, sections: Sequence[str]) -> bool:
    """Whether a tensor, by its name, belongs to one of these sections."""
    places = [section_place(section).name for section in sections]
    return any(name == place or name.startswith((f"{place}.", f"{place}@")) for place in places)


def gradient_in(flat: torch.Tensor, parameter: torch.Tensor, offset: int) -> torch.Tensor:
    """A view of a parameter's gradient, which begins at element `offset` of the decompressed bucket `flat`."""
    part = flat[offset : offset + parameter.numel()]
    if _is_dense(parameter):
        return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
    return part.view(parameter.shape)


def fits_bucket(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a bucket may contain this gradient: the order of its elements in memory must be that of its parameter."""
    if is_dtensor(parameter) or gradient.layout is not torch.strided or gradient.shape != parameter.shape:
        return False
    return gradient.stride() == parameter.stride() if _is_dense(parameter) else gradient.is_contiguous()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill one contiguous range of memory, in any order."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
