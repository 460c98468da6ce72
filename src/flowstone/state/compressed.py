"""Compressed gradients: what training exchanges in their place, and who can make gradients of it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import torch

from flowstone.state.names import section_place
from flowstone.state.records import PerRank
from flowstone.state.shards import is_dtensor


class CompressedBucket(msgspec.Struct, frozen=True, eq=False):
    """The gradients of some parameters, exchanged in one piece.

    parameters  whose gradients it has
    offsets     for each of them where its gradient begins in the decompressed bucket, in elements; it has the order of
                the parameter's memory (row-major, where that has gaps)
    length      of the decompressed bucket, in elements
    tensors     what it is decompressed from, equal on all ranks; their memory stays as it is
    is_applied  tells at the optimizer's step whether the parameters still have these very gradients; None: the journal
                decompresses the bucket and compares each bit
    """

    parameters: Sequence[torch.Tensor]
    offsets: Sequence[int]
    length: int
    tensors: Mapping[str, torch.Tensor]
    is_applied: Callable[[], bool] | None = None


@runtime_checkable
class CompressedGradients(Protocol):
    """What exchanges gradients in a compressed form. As a section of the state, with `every_step`, it lets the journal
    log that form. Like any object of the state it has `state_dict` and `load_state_dict`.

    kind   names the way of decompression; a journal is replayed by a source of the same kind, and of the same section
    exact  whether its state_dict() at a step follows from what is logged: then its tensors are logged as those of other
           objects are. If not (a residual of what was not sent), they are saved in whole checkpoints alone, and
           `replayed` brings them near to what they were
    """

    @property
    def kind(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def compressed(self) -> Sequence[CompressedBucket]:
        """The buckets of the last exchange: what the gradients are now made of. Called before an optimizer's step."""

    def decompress(self, tensors: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        """The gradients of a bucket, `length` elements in one dimension: the same bits at each call, as training used.

        The result is the caller's; `tensors` are not to be changed.
        """

    def replayed(self, bucket: CompressedBucket) -> None:
        """A load has replayed a step with this bucket. Not called if `exact`.

        The bucket's parameters are those of the optimizer that stepped.
        """

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: Mapping[str, object], /) -> None: ...


def sources_of(state: Mapping[str, object]) -> dict[str, CompressedGradients]:
    """The sections of a state that are sources of compressed gradients."""
    found = {}
    for section, value in state.items():
        one = value.value if isinstance(value, PerRank) else value
        if not isinstance(one, type) and hasattr(one, "decompress") and isinstance(one, CompressedGradients):
            found[section] = one
    return found


def is_of(name: str, sections: Sequence[str]) -> bool:
    """Whether a tensor, by its name, belongs to one of these sections."""
    places = [section_place(section).name for section in sections]
    return any(name == place or name.startswith((f"{place}.", f"{place}@")) for place in places)


def gradient_in(flat: torch.Tensor, parameter: torch.Tensor, offset: int) -> torch.Tensor:
    """A parameter's gradient in a decompressed bucket: a view."""
    part = flat[offset : offset + parameter.numel()]
    if _is_dense(parameter):
        return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
    return part.view(parameter.shape)


def takes_part(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a gradient can be one that a bucket has: it has the order of its parameter's memory."""
    if is_dtensor(parameter) or gradient.layout is not torch.strided or gradient.shape != parameter.shape:
        return False
    return gradient.stride() == parameter.stride() if _is_dense(parameter) else gradient.is_contiguous()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one run of memory, in whichever order."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
