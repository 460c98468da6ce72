"""A typed record of memory that goes into huge pages, which a Checkpointer passes to its `on_event` as well."""

from __future__ import annotations

from dataclasses import dataclass


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
