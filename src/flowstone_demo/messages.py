"""Messages from the training process to the supervisor. Each is a line of JSON on the process' standard output."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from flowstone_demo.sizes import DemoSize, RankDemoSize

LOST = 3  # exit status of a rank that ends because another rank has ended


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a training process must do. It is passed as the process' argument.

    save_every   how many steps there are from one save to the next; None: only the last step is saved
    every_step   whether to save each step, in a journal between full checkpoints; `save_every` is 1 in that case
    torch_saves  how many times to time torch.save of the same state at the end, in `scratch`
    flip_bit     whether to flip one bit of one weight before the last save
    """

    form: DemoSize
    seed: int
    store: str
    scratch: str
    save_every: int | None
    torch_saves: int = 0
    every_step: bool = False
    flip_bit: bool = False


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What each rank of a job must do. It is passed as the process' argument. The environment has the rank and the
    number of ranks.

    flip_bit     whether to flip one bit of one weight after each load
    """

    form: RankDemoSize
    seed: int
    store: str
    flip_bit: bool = False


class Began(msgspec.Struct, frozen=True, tag=True):
    """Training begins after step `resumed_step`, which was loaded in `load_s` seconds. None: it begins at step 0."""

    resumed_step: int | None
    parameters: int
    load_s: float


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """A step and its save are done, `seconds` after the step before; 0 for the first step of a process."""

    step: int
    loss: float
    seconds: float = 0.0


class Undisturbed(msgspec.Struct, frozen=True, tag=True):
    """A step of the run without saves and kills is done."""

    step: int
    loss: float


class Held(msgspec.Struct, frozen=True, tag=True):
    """The digest of a full tensor, or of another value, that is in memory at `step`, after a load (`loaded`) or before
    a save.
    """

    step: int
    loaded: bool
    name: str
    sha256: str
    bytes: int


class Saving(msgspec.Struct, frozen=True, tag=True):
    """A save of `step` begins now. The messages `Held` before this one have its content."""

    step: int


class SaveCaptured(msgspec.Struct, frozen=True, tag=True):
    """`save` has returned, after it has blocked training for `blocked_s` seconds."""

    step: int
    blocked_s: float


class Saved(msgspec.Struct, frozen=True, tag=True):
    """`save` of a step has returned, after `blocked_s` seconds."""

    step: int
    blocked_s: float


class StepDurable(msgspec.Struct, frozen=True, tag=True):
    """The journal can replay the step, which became durable `seconds` after `save` was called."""

    step: int
    bytes: int
    seconds: float


class SaveCommitted(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint is durable. This took `seconds` from the call of `save`."""

    step: int
    bytes: int
    seconds: float


class TorchSaved(msgspec.Struct, frozen=True, tag=True):
    """How long torch.save of the same state took, with fsync of file and directory."""

    bytes: int
    seconds: float


class Lost(msgspec.Struct, frozen=True, tag=True):
    """This rank ends because another rank has ended. `words`: the error that reported that."""

    words: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The run is complete. `sha256`: digest of its full state in memory. `bytes`: size of its tensors."""

    step: int
    sha256: str
    bytes: int


Message: TypeAlias = (
    Began | Stepped | Undisturbed | Held | Saving | SaveCaptured | SaveCommitted | Saved | StepDurable | TorchSaved
    | Lost | Finished
)


def encode(message: Message) -> bytes:
    """The message as one line of JSON. Numbers keep all their digits."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    message: Message = msgspec.json.decode(line, type=Message)
    return message
