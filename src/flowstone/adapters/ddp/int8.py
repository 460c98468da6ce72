"""Eight bits for each element, and a scale for each block of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from flowstone.adapters.ddp.compression import _TOLD, Compression
from flowstone.errors import ArgumentError
from flowstone.state.compressed import CompressedBucket

_BEGINS = "begins"
_LARGEST = 127
_LOOKED_AT = 4096


class Int8Gradients(Compression):
    """Each rank sends each element as a whole number from -127 to 127, times the largest magnitude of its block / 127.

    model           which DistributedDataParallel wraps, or that wrapper; its parameters are of one dtype
    block           elements with one scale
    error_feedback  what rounding has taken away is added to the next gradient. Without it all of this is exact after a
                    replay

    raises  ArgumentError
    """

    def __init__(self, model: torch.nn.Module, *, block: int = 256, error_feedback: bool = True) -> None:
        if type(block) is not int or block < 1:
            raise ArgumentError(f"block={block!r:.40} is no number of elements", next="give 1 or more")
        super().__init__(model, error_feedback=error_feedback)
        self._block = block

    @property
    def kind(self) -> str:
        return f"flowstone.int8.1.{self._block}"

    def _blocks(self, begins: Sequence[int], length: int) -> Iterator[tuple[int, int, int]]:
        """Of each gradient in a bucket: begin, end, and how many blocks it has."""
        for begin, end in pairwise((*begins, length)):
            yield begin, end, -(-(end - begin) // self._block)

    def _take(self, flat: torch.Tensor, begins: Sequence[int]) -> tuple[torch.Tensor, bool]:
        scales, numbers, is_finite = list[torch.Tensor](), list[torch.Tensor](), True
        for begin, end, blocks in self._blocks(begins, len(flat)):
            padded = torch.zeros((blocks, self._block), dtype=torch.float32, device=flat.device)
            padded.view(-1)[: end - begin] = flat[begin:end]
            scale = padded.abs().amax(1).div_(_LARGEST)
            is_finite = is_finite and bool(scale.isfinite().all())
            padded.div_(scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().nan_to_num_()
            scales.append(scale)
            numbers.append(padded.clamp_(-_LARGEST, _LARGEST).to(torch.int8).view(-1)[: end - begin])
        sent = torch.cat([one.view(torch.uint8) for one in (*scales, *numbers)])
        taken = torch.zeros_like(flat)
        self._add(taken, sent, {_BEGINS: torch.tensor(begins)})
        flat.sub_(taken)
        return sent, is_finite

    def _besides(self, begins: Sequence[int]) -> dict[str, torch.Tensor]:
        return {_BEGINS: torch.tensor(begins)}

    def _add(self, flat: torch.Tensor, sent: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        begins = tensors[_BEGINS].tolist()
        if not 0 <= begins[0] <= begins[-1] <= len(flat) or begins != sorted(begins):
            raise ValueError("gradients that lie elsewhere than in their bucket")
        runs = list(self._blocks(begins, len(flat)))
        scale_bytes = 4 * sum(blocks for _, _, blocks in runs)
        if len(sent) != scale_bytes + len(flat) - begins[0]:
            raise ValueError(f"{len(sent)} bytes of a bucket of {len(flat)} elements")
        scales = sent[:scale_bytes].clone().view(torch.float32)
        numbers, at = sent[scale_bytes:].view(torch.int8), 0
        for begin, end, blocks in runs:
            values = torch.zeros((blocks, self._block), dtype=torch.float32, device=sent.device)
            values.view(-1)[: end - begin] = numbers[begin - runs[0][0] : end - runs[0][0]]
            values.mul_(scales[at : at + blocks, None])
            flat[begin:end].add_(values.view(-1)[: end - begin].to(flat.dtype))
            at += blocks

    def _telling(self, flat: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        apart = max(1, len(flat) // _LOOKED_AT)
        some = flat[::apart]
        return some.abs().topk(min(_TOLD, len(some))).indices * apart

    def replayed(self, bucket: CompressedBucket) -> None:
        """Everything was sent but for the rounding, half a step of it at most, which is lost."""
        for parameter in bucket.parameters:
            self._residual[self._names[id(parameter)]].zero_()
