"""Gradients with 8 bits for each element, and one scale for each block of elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from flowstone.adapters.ddp.compression import _SAMPLES, Compression
from flowstone.errors import ArgumentError
from flowstone.torch.compressed import CompressedBucket

_BEGINS = "begins"
_LARGEST = 127
_SAMPLED_ELEMENTS = 4096


class Int8Gradients(Compression):
    """Each rank sends each element as an integer from -127 to 127. The integer is multiplied by a scale: the largest
    magnitude in the element's block, divided by 127.

    model           the model, with or without DistributedDataParallel around it; all parameters have one dtype
    block           how many elements have one scale
    error_feedback  whether to add the rounding error to the next gradient. Without it, a replay is exact

    raises  ArgumentError
    """

    def __init__(self, model: torch.nn.Module, *, block: int = 256, error_feedback: bool = True) -> None:
        if type(block) is not int or block < 1:
            raise ArgumentError(
                f"`block` must be at least 1, got {block!r:.40}", next="give the number of elements that share a scale"
            )
        super().__init__(model, error_feedback=error_feedback)
        self._block = block

    @property
    def kind(self) -> str:
        return f"flowstone.int8.1.{self._block}"

    def _blocks(self, begins: Sequence[int], length: int) -> Iterator[tuple[int, int, int]]:
        """Begin, end and number of blocks of each gradient in a bucket."""
        for begin, end in pairwise((*begins, length)):
            yield begin, end, -(-(end - begin) // self._block)

    def _compress(self, flat: torch.Tensor, begins: Sequence[int]) -> tuple[torch.Tensor, bool]:
        scales, numbers, is_finite = list[torch.Tensor](), list[torch.Tensor](), True
        for begin, end, blocks in self._blocks(begins, len(flat)):
            padded = torch.zeros((blocks, self._block), dtype=torch.float32, device=flat.device)
            padded.view(-1)[: end - begin] = flat[begin:end]
            scale = padded.abs().amax(1).div_(_LARGEST)
            is_finite = is_finite and bool(scale.isfinite().all())
            padded.div_(scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().nan_to_num_()
            scales.append(scale)
            numbers.append(padded.clamp_(-_LARGEST, _LARGEST).to(torch.int8).view(-1)[: end - begin])
        sent = torch.cat([part.view(torch.uint8) for part in (*scales, *numbers)])
        taken = torch.zeros_like(flat)
        self._add_payload(taken, sent, {_BEGINS: torch.tensor(begins)})
        flat.sub_(taken)
        return sent, is_finite

    def _extra_tensors(self, begins: Sequence[int]) -> dict[str, torch.Tensor]:
        return {_BEGINS: torch.tensor(begins)}

    def _add_payload(self, flat: torch.Tensor, sent: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        begins = tensors[_BEGINS].tolist()
        if not 0 <= begins[0] <= begins[-1] <= len(flat) or begins != sorted(begins):
            raise ValueError("offsets of gradients in their bucket are negative, not ascending, or beyond its end")
        runs = list(self._blocks(begins, len(flat)))
        scale_bytes = 4 * sum(blocks for _, _, blocks in runs)
        if len(sent) != scale_bytes + len(flat) - begins[0]:
            raise ValueError(f"a bucket of {len(flat)} elements cannot have {len(sent)} compressed bytes")
        scales = sent[:scale_bytes].clone().view(torch.float32)
        numbers, block = sent[scale_bytes:].view(torch.int8), 0
        for begin, end, blocks in runs:
            values = torch.zeros((blocks, self._block), dtype=torch.float32, device=sent.device)
            values.view(-1)[: end - begin] = numbers[begin - runs[0][0] : end - runs[0][0]]
            values.mul_(scales[block : block + blocks, None])
            flat[begin:end].add_(values.view(-1)[: end - begin].to(flat.dtype))
            block += blocks

    def _sample_positions(self, flat: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        apart = max(1, len(flat) // _SAMPLED_ELEMENTS)
        some = flat[::apart]
        return some.abs().topk(min(_SAMPLES, len(some))).indices * apart

    def replayed(self, bucket: CompressedBucket) -> None:
        """Set the residual to zero. Only rounding errors are lost: at most half a quantization step for each element.
        """
        for parameter in bucket.parameters:
            self._residual[self._names[id(parameter)]].zero_()
