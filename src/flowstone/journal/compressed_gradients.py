"""Find a step's gradients that were exchanged in compressed form: the journal logs them in that form.

A bucket (gradients that are exchanged together) qualifies if its gradients equal the decompressed ones bit for bit, or
equal the decompressed ones multiplied by one number, for example after unscaling or clipping. The number is found by
comparison, so its cause does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from flowstone.journal.journal_format import CompressedRow
from flowstone.torch.compressed import CompressedBucket, CompressedGradients, fits_bucket, gradient_in

_PROBED = 4096  # number of elements that are compared first; all are compared only if these are equal
_AROUND = 2  # the error of a quotient of two rounded numbers is at most this many units in the last place
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LoggedBucket(msgspec.Struct, frozen=True, eq=False):
    """A bucket (gradients that are exchanged together) that is logged in compressed form, with the version counters of
    its tensors. See journal_format.CompressedRow.
    """

    source: int
    tensors: Mapping[str, torch.Tensor]
    versions: tuple[int, ...]
    length: int
    parameters: tuple[tuple[int, int], ...]
    scale: float | None

    @property
    def is_unchanged(self) -> bool:
        return self.versions == tuple([tensor._version for tensor in self.tensors.values()])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def row(self, add_tensor: Callable[[torch.Tensor], int]) -> CompressedRow:
        """The description of this bucket for the journal's record of the step. `add_tensor` adds a tensor to that
        record, and returns the tensor's position there.
        """
        return CompressedRow(
            self.source, {name: add_tensor(tensor) for name, tensor in self.tensors.items()}, self.length,
            self.parameters, self.scale,
        )


def compress(
    sources: Sequence[CompressedGradients], parameters: Sequence[torch.Tensor], gradients: Mapping[int, torch.Tensor]
) -> tuple[tuple[LoggedBucket, ...], str]:
    """Returns the compressed buckets that are logged instead of an optimizer's gradients, and the reason why a bucket
    cannot be logged in compressed form ("" if all can).

    gradients  this rank's gradients, by position among `parameters`
    """
    positions = {id(parameter): number for number, parameter in enumerate(parameters)}
    logged, why = list[LoggedBucket](), ""
    for number, source in enumerate(sources):
        for bucket in source.compressed():
            members = [
                (positions[id(parameter)], offset)
                for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True)
                if positions.get(id(parameter), -1) in gradients
            ]
            if not members:
                continue
            matches, scale, reason = _match(source, bucket, members, parameters, gradients)
            if not matches:
                why = why or f"gradients that {source.kind} exchanged (first: of parameter {members[0][0]}) {reason}"
                continue
            tensors = {name: tensor.detach() for name, tensor in bucket.tensors.items()}
            versions = tuple([tensor._version for tensor in tensors.values()])
            logged.append(LoggedBucket(number, tensors, versions, bucket.length, tuple(members), scale))
    return tuple(logged), why


def _match(
    source: CompressedGradients, bucket: CompressedBucket, members: Sequence[tuple[int, int]],
    parameters: Sequence[torch.Tensor], gradients: Mapping[int, torch.Tensor],
) -> tuple[bool, float | None, str]:
    """Returns whether a bucket's gradients are the decompressed ones multiplied by one number; that number (None: 1);
    and, if they are not, the reason.
    """
    if not all(fits_bucket(parameters[index], gradients[index]) for index, _ in members):
        return False, None, "have another memory layout than their parameters"
    if bucket.length > sum(parameter.numel() for parameter in parameters):
        return False, None, "share a bucket with gradients of parameters that this optimizer does not step"
    if bucket.is_applied is not None and bucket.is_applied():
        return True, None, ""
    flat = source.decompress(bucket.tensors, bucket.length)
    pairs = [(gradient_in(flat, parameters[index], offset), gradients[index]) for index, offset in members]
    if any((first.dtype, first.device) != (second.dtype, second.device) for first, second in pairs):
        return False, None, "have another dtype, or are on another device"
    if all(_same(decompressed, gradient) for decompressed, gradient in pairs):
        return True, None, ""
    scale = _scale(pairs)
    if scale is None:
        return False, None, "were changed after the exchange, by more than one common factor"
    return True, scale, ""


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same bits: a NaN equals itself, and zeros of two signs differ."""
    bits = _BITS[first.element_size()]
    return torch.equal(first.view(bits), second.view(bits))


def _scale(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """The number that turns the first tensor of each pair into the second by multiplication; None if there is no such
    number.
    """
    if not pairs[0][0].is_floating_point():
        return None
    largest = max(pairs, key=lambda pair: float(pair[0].abs().max()) if pair[0].numel() else -1.0)
    own, other = (tensor.reshape(-1) for tensor in largest)
    probed = own.abs().topk(min(_PROBED, len(own))).indices
    own, other = own[probed], other[probed]
    quotient = other[0] / own[0]
    for candidate in _around(quotient):
        factor = float(candidate)
        if _same(own * factor, other) and all(_same(first * factor, second) for first, second in pairs):
            return factor
    return None


def _around(quotient: torch.Tensor) -> list[torch.Tensor]:
    """The finite ones among `quotient`, the next _AROUND larger and the next _AROUND smaller numbers in its dtype."""
    bits = quotient.view(_BITS[quotient.element_size()])
    candidates = [(bits + off).view(quotient.dtype) for off in range(-_AROUND, _AROUND + 1)]
    return [candidate for candidate in candidates if bool(candidate.isfinite())]
