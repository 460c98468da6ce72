"""The messages between the processes of bench/interference.py, which its `--json` stores.

Seconds and bytes; a GB is 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a GPT-2. Its parameters are in fp32, and so are AdamW's two moments of each: 12 bytes a parameter."""

    vocabulary: int
    context: int
    width: int
    depth: int
    heads: int

    @property
    def parameters(self) -> int:
        """Parameters; those of output and input embeddings, which are tied, count once."""
        block = 12 * self.width**2 + 13 * self.width
        return (self.vocabulary + self.context + 2) * self.width + self.depth * block


@dataclass(frozen=True, slots=True)
class Window:
    """The data of a step: `batch` windows of `length` tokens."""

    batch: int
    length: int


@dataclass(frozen=True, slots=True)
class Leg:
    """A pair of blocks of `steps` steps each: one without saves, one with a save every `every` steps."""

    every: int
    steps: int


@dataclass(frozen=True, slots=True)
class CalibrationTask:
    """Find the window whose step takes about `target_s`."""

    shape: Shape
    target_s: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The window for the training, and the steps that were measured with it; none if it was given."""

    window: Window
    step_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """Train in one process, leg after leg; then save once more, train on, load it back and compare.

    rival     a name of bench/rivals
    settle_s  rest between blocks
    """

    rival: str
    shape: Shape
    window: Window
    legs: tuple[Leg, ...]
    directory: str
    settle_s: float


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step of training: draw, forward, backward, optimizer, and the call of `save` after it if one is due.

    optimizer_s  of that, inside `optimizer.step()`, including a wait at a fence
    save_s       of that, inside `save`; None: none was due
    """

    number: int
    seconds: float
    optimizer_s: float
    save_s: float | None = None


@dataclass(frozen=True, slots=True)
class SavedSample:
    """One save of a training.

    number    of the step after which it was made
    save_s    inside the call, by the caller's clock
    fence_s   waits of later steps for it, as the system reports; 0 for systems without a fence
    durable_s from the call until files and directories were synced; None: it failed, with `error`
    """

    number: int
    save_s: float
    fence_s: float
    durable_s: float | None
    error: str | None = None

    @property
    def blocked_s(self) -> float:
        return self.save_s + self.fence_s


@dataclass(frozen=True, slots=True)
class Block:
    """Steps in a row.

    every       steps from save to save; 0: no saves
    drain_s     behind the last step, until the last save was durable: the next save would have waited for it
    cpu_s       of all threads and children, all told
    peak_bytes  the highest resident memory
    shared_bytes  the highest resident shared memory, sampled behind every step; contained in `peak_bytes`
    """

    every: int
    steps: tuple[StepSample, ...]
    saves: tuple[SavedSample, ...]
    drain_s: float
    cpu_s: float
    peak_bytes: int
    shared_bytes: int

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps) + self.drain_s


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """The results of a training process.

    blocks       in the order in which they ran; blocks 2n and 2n + 1 are a leg
    before_bytes, before_shared_bytes  the same peaks before the first save, over steps
    differing    the tensors of the last save that were loaded with other bytes than they had at its `save`
    """

    payload_bytes: int
    tensors: int
    before_bytes: int
    before_shared_bytes: int
    blocks: tuple[Block, ...]
    differing: tuple[str, ...]

    def legs(self) -> Iterator[tuple[Block, Block]]:
        """(without saves, with saves)."""
        for block, other in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            yield (other, block) if block.every else (block, other)


@dataclass(frozen=True, slots=True)
class Trained:
    """A training and its place in the run; `error` if its process failed."""

    rival: str
    round: int
    outcome: TrainingOutcome | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DrillTask:
    """Flowstone alone, without forward and backward: saves of an AdamW's state of equal tensors.

    tensors       of the parameters and both their moments, together `state_bytes`
    budget_bytes  of the Checkpointer; None: its default
    stepping      every save is followed at once by a step of the optimizer; else by none until it is durable
    """

    tensors: int
    state_bytes: int
    saves: int
    budget_bytes: int | None
    stepping: bool
    directory: str
    settle_s: float


@dataclass(frozen=True, slots=True)
class DrillSample:
    """One save of a drill.

    save_s, fence_s, durable_s  as of a SavedSample
    cpu_s           of all threads until durable; with the step's, where one followed
    peak_bytes      the highest resident memory meanwhile
    shared_bytes    resident shared memory, behind `save` or once durable, whichever is higher
    dirty_bytes     the same of the machine's dirty pages and those under writeback, of all processes
    copied_bytes    what was written, by Flowstone's own word
    """

    number: int
    save_s: float
    fence_s: float
    durable_s: float
    cpu_s: float
    peak_bytes: int
    shared_bytes: int
    dirty_bytes: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class DrillOutcome:
    """`before_bytes`: resident memory before the first save. `failures`: of saves, in words."""

    payload_bytes: int
    before_bytes: int
    samples: tuple[DrillSample, ...]
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drilled:
    """A drill and its place in the run; `error` if its process failed."""

    drill: str
    round: int
    outcome: DrillOutcome | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """All raw numbers of a run.

    programme  the name of the programme, see programme.py
    rounds     that were completed or begun
    """

    command: str
    started_utc: str
    machine: dict[str, str]
    programme: str
    shape: Shape
    calibration: Calibration
    rounds: int
    trained: tuple[Trained, ...] = ()
    drilled: tuple[Drilled, ...] = ()
