"""Which gradients of a step are what a source decompresses: then its tensors are logged, and the gradients are not.

A bucket counts if its gradients are the decompression bit for bit, or that times one number: an unscaling or a clipping
after the exchange. The number is found by comparing, so it does not matter what has multiplied them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from flowstone.format.journal import CompressedRow
from flowstone.state.compressed import CompressedBucket, CompressedGradients, gradient_in, takes_part

_PROBED = 4096  # elements of one gradient, before all are compared
_AROUND = 2  # a quotient of two rounded numbers is this many steps of its precision off, at most
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Compressed(msgspec.Struct, frozen=True, eq=False):
    """A bucket whose tensors are logged; see format.journal.CompressedRow. `versions`: of its tensors."""

    source: int
    tensors: Mapping[str, torch.Tensor]
    versions: tuple[int, ...]
    length: int
    parameters: tuple[tuple[int, int], ...]
    scale: float | None

    @property
    def is_unchanged(self) -> bool:
        return self.versions == tuple([one._version for one in self.tensors.values()])

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors.values())

    def row(self, added: Callable[[torch.Tensor], int]) -> CompressedRow:
        """`added`: gives a tensor its position in the frame."""
        return CompressedRow(
            self.source, {name: added(one) for name, one in self.tensors.items()}, self.length, self.parameters,
            self.scale,
        )


def compress(
    sources: Sequence[CompressedGradients], parameters: Sequence[torch.Tensor], gradients: Mapping[int, torch.Tensor]
) -> tuple[tuple[Compressed, ...], str]:
    """What stands for the gradients of an optimizer; and why something does not, "" if all of every source does.

    gradients  by position among `parameters`; what this rank holds
    """
    at = {id(parameter): number for number, parameter in enumerate(parameters)}
    found, why = list[Compressed](), ""
    for number, source in enumerate(sources):
        for bucket in source.compressed():
            members = [
                (at[id(one)], offset) for one, offset in zip(bucket.parameters, bucket.offsets, strict=True)
                if at.get(id(one), -1) in gradients
            ]
            if not members:
                continue
            matches, scale, reason = _match(source, bucket, members, parameters, gradients)
            if not matches:
                why = why or f"gradients that {source.kind} exchanged (of parameter {members[0][0]} first) {reason}"
                continue
            tensors = {name: one.detach() for name, one in bucket.tensors.items()}
            versions = tuple([one._version for one in tensors.values()])
            found.append(Compressed(number, tensors, versions, bucket.length, tuple(members), scale))
    return tuple(found), why


def _match(
    source: CompressedGradients, bucket: CompressedBucket, members: Sequence[tuple[int, int]],
    parameters: Sequence[torch.Tensor], gradients: Mapping[int, torch.Tensor],
) -> tuple[bool, float | None, str]:
    """Whether the gradients are the decompression, times a number (None: no other than one); and why not."""
    if not all(takes_part(parameters[at], gradients[at]) for at, _ in members):
        return False, None, "lie in memory otherwise than their parameters"
    if bucket.length > sum(one.numel() for one in parameters):
        return False, None, "came in one bucket with those of parameters that this optimizer does not step"
    if bucket.is_applied is not None and bucket.is_applied():
        return True, None, ""
    flat = source.decompress(bucket.tensors, bucket.length)
    pairs = [(gradient_in(flat, parameters[at], offset), gradients[at]) for at, offset in members]
    if any(one.dtype != other.dtype or one.device != other.device for one, other in pairs):
        return False, None, "are of another dtype, or on another device"
    if all(_same(one, other) for one, other in pairs):
        return True, None, ""
    scale = _scale(pairs)
    if scale is None:
        return False, None, "were changed after the exchange, not by one factor"
    return True, scale, ""


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits: a NaN equals itself, and zeros of two signs differ."""
    bits = _BITS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))


def _scale(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """The number that makes the first of each pair the second; None if there is none."""
    if not pairs[0][0].is_floating_point():
        return None
    largest = max(pairs, key=lambda pair: float(pair[0].abs().max()) if pair[0].numel() else -1.0)
    own, other = (one.reshape(-1) for one in largest)
    probed = own.abs().topk(min(_PROBED, len(own))).indices
    own, other = own[probed], other[probed]
    quotient = other[0] / own[0]
    for candidate in _around(quotient):
        factor = float(candidate)
        if _same(own * factor, other) and all(_same(one * factor, two) for one, two in pairs):
            return factor
    return None


def _around(quotient: torch.Tensor) -> list[torch.Tensor]:
    """A number, and those next to it at its precision."""
    bits = quotient.view(_BITS[quotient.element_size()])
    found = [(bits + off).view(quotient.dtype) for off in range(-_AROUND, _AROUND + 1)]
    return [one for one in found if bool(one.isfinite())]
