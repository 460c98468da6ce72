"""What the training process tells the supervisor: one JSON line each, on its standard output."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from flowstone.demo.forms import Form


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a training process is to do: its one argument.

    save_every   None: only the last step is saved
    torch_saves  how often to time torch.save of the same state at the end, into `scratch`
    flip_bit     falsify one bit of one weight before the last save
    """

    form: Form
    seed: int
    store: str
    scratch: str
    save_every: int | None
    torch_saves: int = 0
    flip_bit: bool = False


class Began(msgspec.Struct, frozen=True, tag=True):
    """Training begins after `resumed_step`, loaded in `load_s`; None for a fresh start."""

    resumed_step: int | None
    parameters: int
    load_s: float


class Stepped(msgspec.Struct, frozen=True, tag=True):
    step: int
    loss: float


class SaveCaptured(msgspec.Struct, frozen=True, tag=True):
    """`save` returned, having kept training waiting for `blocked_s`."""

    step: int
    blocked_s: float


class SaveCommitted(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint is durable, `seconds` after `save` was called."""

    step: int
    bytes: int
    seconds: float


class TorchSaved(msgspec.Struct, frozen=True, tag=True):
    """torch.save of the same state, file and directory fsynced."""

    bytes: int
    seconds: float


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The run is over; `sha256` of everything that it held in memory, `bytes` of tensors."""

    step: int
    sha256: str
    bytes: int


Message: TypeAlias = Began | Stepped | SaveCaptured | SaveCommitted | TorchSaved | Finished


def encode(message: Message) -> bytes:
    """A line. Numbers read back bit for bit."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    message: Message = msgspec.json.decode(line, type=Message)
    return message
