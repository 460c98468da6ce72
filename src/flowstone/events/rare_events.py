"""Events that few saves and loads emit: about encoded chunks, huge pages, staging memory, and skipped checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PagesCollapsed:
    """The result of one background pass that collapses into huge pages the memory that is captured after `save`
    returns. Emitted when the next save is committed, or by `close`. The next save interrupts a running pass, and a new
    pass begins after that save.

    step             step of the save after which the pass began; None: it began after `prepare`
    bytes            length of the memory on this rank
    huge_bytes       how many of these bytes are in huge pages now
    collapsed_bytes  length of the huge pages that this pass made
    processor_s      processor time that the pass took
    reason           why other bytes are in small pages; "" if all are in huge pages
    """

    step: int | None
    bytes: int
    huge_bytes: int
    collapsed_bytes: int
    processor_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Compressed:
    """The chunks that a save with `EngineOptions.compress`, or with `rules` that quantize, has encoded on this rank.

    data_bytes    length, before encoding, of the encoded chunks that are new in this checkpoint; 0: none was encoded
    stored_bytes  the stored length of these chunks
    seconds       time that all engine threads together took to encode
    why           the reason for the choice of chunks, for human readers; `flowstone show` prints it, too
    codecs        `data_bytes` and `stored_bytes` by codec; "raw": chunks that encoding would not make shorter
    """

    step: int
    data_bytes: int
    stored_bytes: int
    seconds: float
    why: str = ""
    codecs: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Staging memory is ready: after `Checkpointer.prepare`, or after the first commit of a state on a GPU.

    bytes             size of the staging memory that the system has allocated
    pinned_bytes      how many of these bytes are pinned, so that a GPU copies directly into them; 0 without a GPU
    unpinned_reason   why the other bytes are not pinned although a GPU is in use; "" if pinning was not refused
    numa_node         the GPU's NUMA node, on which memory was requested; -1: no node was requested
    numa_node_reason  why no node was requested; "" if `numa_node` was requested
    seconds           time that `prepare` took; 0.0 if a save allocated the memory
    """

    bytes: int
    pinned_bytes: int
    unpinned_reason: str
    numa_node: int
    numa_node_reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class BuffersFromOneRank:
    """Several ranks hold the same module buffers (such as BatchNorm statistics), with values that may differ. Of each
    buffer, the value of the lowest of these ranks is saved.

    tensors  number of these buffers in the job
    """

    step: int
    tensors: int


@dataclass(frozen=True, slots=True)
class FellBack:
    """A damaged checkpoint was skipped, and an older one is loaded, as the option `fallback` allows."""

    damaged_step: int
    reason: str
