"""The largest elements of each gradient, and where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from flowstone.adapters.ddp.compression import _TOLD, Compression
from flowstone.errors import ArgumentError
from flowstone.state.compressed import CompressedBucket

_INDEX_BYTES = 4


class TopKGradients(Compression):
    """Each rank sends, of each parameter's gradient, the share `ratio` of elements that are largest in magnitude.

    model           which DistributedDataParallel wraps, or that wrapper; its parameters are of one dtype
    ratio           0 to 1; of each gradient one element at least is sent
    error_feedback  what is not sent is added to the next gradient. Without it all of this is exact after a replay, and
                    training may need a larger ratio

    raises  ArgumentError
    """

    def __init__(self, model: torch.nn.Module, *, ratio: float = 0.01, error_feedback: bool = True) -> None:
        if not 0 < ratio <= 1:
            raise ArgumentError(f"ratio={ratio!r:.40} is no share of a gradient", next="give one above 0, up to 1")
        super().__init__(model, error_feedback=error_feedback)
        self._ratio = ratio

    @property
    def kind(self) -> str:
        return "flowstone.top-k.1"

    def _take(self, flat: torch.Tensor, begins: Sequence[int]) -> tuple[torch.Tensor, bool]:
        magnitude, found = flat.abs(), list[torch.Tensor]()
        for begin, end in pairwise((*begins, len(flat))):
            count = max(1, int(self._ratio * (end - begin)))
            found.append(magnitude[begin:end].topk(min(count, end - begin), sorted=False).indices.add_(begin))
        index = torch.cat(found)
        values = flat[index]
        flat.index_fill_(0, index, 0)
        is_finite = bool(values.isfinite().all())
        return torch.cat([index.to(torch.int32).view(torch.uint8), values.view(torch.uint8)]), is_finite

    def _add(self, flat: torch.Tensor, sent: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        index, values = _parts(sent, flat.element_size())
        if index.device.type != "cpu" and len(index):  # on a CPU torch looks; here the process would lose its device
            low, high = torch.stack(index.aminmax()).tolist()
            if low < 0 or high >= len(flat):
                raise IndexError(f"elements {low} to {high} of a bucket of {len(flat)}")
        flat.index_add_(0, index, values.view(flat.dtype))

    def _telling(self, flat: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        index, _ = _parts(sent, flat.element_size())
        return index[flat[index].abs().topk(min(_TOLD, len(index))).indices].long()

    def replayed(self, bucket: CompressedBucket) -> None:
        """What this rank has sent is in its residual no more; what it has not sent since the checkpoint is lost."""
        rows = bucket.tensors["sent"]
        index, _ = _parts(rows[self._rank % len(rows)], bucket.parameters[0].element_size())
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            own = self._residual[self._names[id(parameter)]]
            within = index[(index >= offset) & (index < offset + len(own))] - offset
            own.index_fill_(0, within.long().to(own.device), 0)


def _parts(sent: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices, and the bytes of the values, of what one rank sent. Both are copies: rows begin anywhere."""
    count = len(sent) // (_INDEX_BYTES + width)
    index = sent[: count * _INDEX_BYTES].clone().view(torch.int32)
    return index, sent[count * _INDEX_BYTES :].clone()
