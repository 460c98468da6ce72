"""Typed records of what some saves do: encode chunks, and collapse memory into huge pages; for `on_event` as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PagesCollapsed:
    """Memory that is captured after `save` returns was collapsed into huge pages, in the background. Emitted when the
    next save is committed, or by `close`; the next save interrupts the work, which continues after that save.

    step             of the save after which it began; None: of `prepare`
    bytes            length of the memory, on this rank
    huge_bytes       of these bytes, those in huge pages now
    collapsed_bytes  length of the huge pages that this pass made
    processor_s      processor time that this took
    reason           why the rest is in small pages; "" if there is none
    """

    step: int | None
    bytes: int
    huge_bytes: int
    collapsed_bytes: int
    processor_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Compressed:
    """What a save with `EngineOptions.compress`, or with `rules` that quantize, has encoded; of this rank.

    data_bytes    of the encoded chunks that an earlier checkpoint does not have; 0: nothing was encoded
    stored_bytes  of those in files
    seconds       of the engine's threads together
    why           it encoded what it did, for people; `flowstone show` tells the same
    codecs        `data_bytes` and `stored_bytes` by codec; "raw": of chunks that encoding does not make shorter
    """

    step: int
    data_bytes: int
    stored_bytes: int
    seconds: float
    why: str = ""
    codecs: Mapping[str, tuple[int, int]] = field(default_factory=dict)
