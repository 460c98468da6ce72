"""Less precision, on request: the one way in which a load gives back other numbers than a save was given."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from flowstone.errors import ArgumentError
from flowstone.rules import check_text

_BLOCK_MIN, _BLOCK_MAX = 16, 4096


@dataclass(frozen=True, slots=True)
class Quantize:
    """Tensors of these names are stored in 8 bits an element, with a scale for each block of elements.

    An idea of Check-N-Run (arXiv 2010.08679). For float32, bfloat16 and float16 tensors of 64 KiB and more; all others
    are stored as they are, and so are chunks of 1 MiB in which an element is not finite. An element comes back off by
    at most 1/15 of itself, or 1/220,000 of the largest of its block, whichever is more; zeros stay zeros, and no other
    element becomes zero, so that an optimizer divides by nothing new. The save checks that.

    pattern  a shell pattern over tensor names, as in fnmatch: 'optimizer.*.exp_avg*'
    bits     of an element, as stored; 8
    block    elements that share a scale, 16 to 4096
    """

    pattern: str
    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        check_text("Quantize", pattern=self.pattern)
        if type(self.bits) is not int or self.bits != 8:
            raise ArgumentError(f"Quantize: {self.bits!r:.200} bits are not offered", next="leave it out: 8")
        if type(self.block) is not int or not _BLOCK_MIN <= self.block <= _BLOCK_MAX:
            raise ArgumentError(
                f"Quantize: block {self.block!r:.200} is not from {_BLOCK_MIN} to {_BLOCK_MAX}", next="leave it out"
            )

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)
