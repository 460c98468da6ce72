"""Sends only the largest elements of each gradient, with their indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from flowstone.adapters.ddp.compression import _SAMPLES, Compression
from flowstone.errors import ArgumentError
from flowstone.torch.compressed import CompressedBucket

_INDEX_BYTES = 4


class TopKGradients(Compression):
    """Each rank sends the fraction `ratio` of each parameter's gradient: the elements with the largest magnitudes.

    model           the model, with or without DistributedDataParallel around it; all parameters have one dtype
    ratio           above 0, up to 1; at least one element of each gradient is sent
    error_feedback  whether the next gradient includes the elements that were not sent. Without it, a replay is exact,
                    but training may need a larger ratio

    raises  ArgumentError
    """

    def __init__(self, model: torch.nn.Module, *, ratio: float = 0.01, error_feedback: bool = True) -> None:
        if not 0 < ratio <= 1:
            raise ArgumentError(
                f"ratio must be above 0 and at most 1, got {ratio!r:.40}",
                next="give the fraction of the elements to send, such as 0.01",
            )
        super().__init__(model, error_feedback=error_feedback)
        self._ratio = ratio

    @property
    def kind(self) -> str:
        return "flowstone.top-k.1"

    def _compress(self, flat: torch.Tensor, begins: Sequence[int]) -> tuple[torch.Tensor, bool]:
        magnitude, indices = flat.abs(), list[torch.Tensor]()
        for begin, end in pairwise((*begins, len(flat))):
            count = max(1, int(self._ratio * (end - begin)))
            indices.append(magnitude[begin:end].topk(min(count, end - begin), sorted=False).indices.add_(begin))
        index = torch.cat(indices)
        values = flat[index]
        flat.index_fill_(0, index, 0)
        is_finite = bool(values.isfinite().all())
        return torch.cat([index.to(torch.int32).view(torch.uint8), values.view(torch.uint8)]), is_finite

    def _add_payload(self, flat: torch.Tensor, sent: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        index, values = _parts(sent, flat.element_size())
        if index.device.type != "cpu" and len(index):  # on a GPU, an invalid index would end the process
            low, high = torch.stack(index.aminmax()).tolist()
            if low < 0 or high >= len(flat):
                raise IndexError(f"indices range from {low} to {high}, but the bucket has {len(flat)} elements")
        flat.index_add_(0, index, values.view(flat.dtype))

    def _sample_positions(self, flat: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        index, _ = _parts(sent, flat.element_size())
        return index[flat[index].abs().topk(min(_SAMPLES, len(index))).indices].long()

    def replayed(self, bucket: CompressedBucket) -> None:
        """Set the sent elements of this rank's residual to zero. Elements that were not sent since the checkpoint are
        lost.
        """
        rows = bucket.tensors["sent"]
        index, _ = _parts(rows[self._rank % len(rows)], bucket.parameters[0].element_size())
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            own = self._residual[self._names[id(parameter)]]
            within = index[(index >= offset) & (index < offset + len(own))] - offset
            own.index_fill_(0, within.long().to(own.device), 0)


def _parts(sent: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices in one rank's payload, and the bytes of the values. Both are copied, as payloads may not be aligned.
    """
    count = len(sent) // (_INDEX_BYTES + width)
    index = sent[: count * _INDEX_BYTES].clone().view(torch.int32)
    return index, sent[count * _INDEX_BYTES :].clone()
