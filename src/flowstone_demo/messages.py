"""Messages from the training process to the supervisor: one JSON line each, on its standard output."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from flowstone_demo.sizes import DemoSize, RankDemoSize

LOST = 3  # exit status of a rank that ends because another rank is gone


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a training process: its one argument.

    save_every   None: only the last step is saved
    every_step   save each step, by a journal between checkpoints; then `save_every` is 1
    torch_saves  how often to time torch.save of the same state at the end, in `scratch`
    flip_bit     flip one bit of one weight before the last save
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
    """The work of each rank of a job: its one argument. The environment has the rank and the number of ranks.

    flip_bit     flip one bit of one weight after each load
    """

    form: RankDemoSize
    seed: int
    store: str
    flip_bit: bool = False


class Began(msgspec.Struct, frozen=True, tag=True):
    """Training begins after `resumed_step`, loaded in `load_s`; None for a fresh start."""

    resumed_step: int | None
    parameters: int
    load_s: float


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """A step is done; `seconds` since the step before was, its save included. 0 for the first step of a process."""

    step: int
    loss: float
    seconds: float = 0.0


class Undisturbed(msgspec.Struct, frozen=True, tag=True):
    """A step of the run without saves and kills."""

    step: int
    loss: float


class Held(msgspec.Struct, frozen=True, tag=True):
    """A whole tensor, or another value, in memory at `step`: just loaded, or about to be saved."""

    step: int
    loaded: bool
    name: str
    sha256: str
    bytes: int


class Saving(msgspec.Struct, frozen=True, tag=True):
    """A save of `step` begins now; its expected content was reported before."""

    step: int


class SaveCaptured(msgspec.Struct, frozen=True, tag=True):
    """`save` returned, after blocking training for `blocked_s`."""

    step: int
    blocked_s: float


class Saved(msgspec.Struct, frozen=True, tag=True):
    """`save` of a step has returned, after `blocked_s`."""

    step: int
    blocked_s: float


class StepDurable(msgspec.Struct, frozen=True, tag=True):
    """The journal has what replays the step, `seconds` after `save` was called."""

    step: int
    bytes: int
    seconds: float


class SaveCommitted(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint is durable, `seconds` after `save` was called."""

    step: int
    bytes: int
    seconds: float


class TorchSaved(msgspec.Struct, frozen=True, tag=True):
    """torch.save of the same state, file and directory fsynced."""

    bytes: int
    seconds: float


class Lost(msgspec.Struct, frozen=True, tag=True):
    """This rank ends, because another one is gone; with the error that said so."""

    words: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The run is over; `sha256` of its whole state in memory, `bytes` of tensors."""

    step: int
    sha256: str
    bytes: int


Message: TypeAlias = (
    Began | Stepped | Undisturbed | Held | Saving | SaveCaptured | SaveCommitted | Saved | StepDurable | TorchSaved
    | Lost | Finished
)


def encode(message: Message) -> bytes:
    """One line. Numbers read back exactly."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    message: Message = msgspec.json.decode(line, type=Message)
    return message
