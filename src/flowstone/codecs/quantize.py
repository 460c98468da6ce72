"""Rules for lossy storage of tensors (8 bits per element). Without such rules, all tensors are stored exactly."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from flowstone.errors import ArgumentError
from flowstone.rules.load_rules import check_text

_BLOCK_MIN, _BLOCK_MAX = 16, 4096


@dataclass(frozen=True, slots=True)
class Quantize:
    """Tensors with matching names are stored with 8 bits per element, and one scale per block of elements.

    The idea is from Check-N-Run (arXiv 2010.08679). Rules apply to float32, bfloat16 and float16 tensors of 64 KiB and
    more. All other tensors are stored exactly, and so are chunks of 1 MiB with an element that is not finite. The error
    of an element is at most 1/15 of the element, or 1/220,000 of the largest element of its block, whichever is more.
    Zeros stay zeros, and no other element becomes zero, so that an optimizer never divides by a new zero. The save
    checks these bounds.

    pattern  a shell pattern of tensor names, as in fnmatch: 'optimizer.*.exp_avg*'
    bits     stored bits per element: 8
    block    number of elements that share a scale, 16 to 4096
    """

    pattern: str
    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        check_text("Quantize", pattern=self.pattern)
        if type(self.bits) is not int or self.bits != 8:
            raise ArgumentError(
                f"Quantize: bits must be 8, not {self.bits!r:.200}", next="omit the option `bits`: 8 is the default"
            )
        if type(self.block) is not int or not _BLOCK_MIN <= self.block <= _BLOCK_MAX:
            raise ArgumentError(
                f"Quantize: block must be from {_BLOCK_MIN} to {_BLOCK_MAX}, not {self.block!r:.200}",
                next="omit the option `block`: the default is 256",
            )

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)
