"""Changes of tensors: in place, without moving version counters, by other libraries, or by replacing them."""

from __future__ import annotations

import copy
import ctypes
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import nn

from hostile.moves.move import Detection, Table

if TYPE_CHECKING:
    from hostile.trainer import Trainer

TABLE = Table()


def some(trainer: Trainer, chance: Random) -> list[torch.Tensor]:
    """One tensor that is captured lazily, or several, or all."""
    every = trainer.job.lazy()
    return chance.sample(every, chance.choice([1, min(3, len(every)), len(every)]))


def watched(trainer: Trainer, chance: Random) -> list[torch.Tensor]:
    """The same, but only tensors in which every write is detected: neither strided nor shared with other processes."""
    return [tensor for tensor in some(trainer, chance) if tensor.is_contiguous() and not tensor.is_shared()]


# Every element


@TABLE.escapes(Detection.SAMPLES)
def add_in_place(trainer: Trainer, chance: Random) -> None:
    """Adds to tensors in place, under no_grad."""
    with torch.no_grad():
        for tensor in some(trainer, chance):
            tensor.add_(1)


@TABLE.escapes(Detection.SAMPLES)
def add_through_data(trainer: Trainer, chance: Random) -> None:
    """Adds to tensors through .data, which moves no counter."""
    for tensor in some(trainer, chance):
        tensor.data.add_(1)


@TABLE.escapes(Detection.SAMPLES)
def add_through_numpy(trainer: Trainer, chance: Random) -> None:
    """Adds to tensors through numpy arrays over the same memory."""
    for tensor in some(trainer, chance):
        if tensor.dtype == torch.float32:
            tensor.detach().numpy()[...] += 1


@TABLE.escapes(Detection.SAMPLES)
def fill_by_address(trainer: Trainer, chance: Random) -> None:
    """Overwrites memory by its address, like another library."""
    for tensor in some(trainer, chance):
        if tensor.is_contiguous():
            ctypes.memset(tensor.data_ptr(), chance.randrange(1, 100), tensor.nbytes)


@TABLE.escapes(Detection.SAMPLES)
def step_of_a_stranger(trainer: Trainer, chance: Random) -> None:
    """A step of an optimizer that is not in the state: plain, foreach or fused."""
    parameters = [p for p in trainer.job.large() if p.is_floating_point() and p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.5, **chance.choice([{}, {"foreach": True}, {"fused": True}]))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    trainer.job.zero_grad()


@TABLE.escapes(Detection.SAMPLES)
def initialise_again(trainer: Trainer, chance: Random) -> None:
    """Initialises a layer again."""
    nn.init.normal_(chance.choice(trainer.job.large()))


@TABLE.escapes(Detection.SAMPLES)
def load_state_dict(trainer: Trainer, chance: Random) -> None:
    """Loads another model's weights with load_state_dict."""
    other = copy.deepcopy(trainer.job.model.state_dict())
    for value in other.values():
        if value.is_floating_point():
            value.add_(1)
    trainer.job.model.load_state_dict(other)


@TABLE.escapes(Detection.SAMPLES)
def clip_weights(trainer: Trainer, chance: Random) -> None:
    """Clips all weights to a small range, like those of a critic."""
    with torch.no_grad():
        for parameter in trainer.job.large():
            parameter.clamp_(-1e-6, 1e-6)


@TABLE.escapes(Detection.SAMPLES)
def reset_slots(trainer: Trainer, chance: Random) -> bool | None:
    """Fills an optimizer's slots."""
    slots = trainer.job.slots()
    for slot in slots:
        slot.fill_(chance.random())
    return None if slots else False


@TABLE.escapes(Detection.SAMPLES)
def restore_by_copy(trainer: Trainer, chance: Random) -> None:
    """Moves weights away and back, so that all values are the same at the end, but not in between."""
    for tensor in some(trainer, chance):
        kept = tensor.detach().clone()
        tensor.data.fill_(-1)
        tensor.data.copy_(kept)


# Few bytes


def _few(tensor: torch.Tensor, chance: Random) -> torch.Tensor:
    """A view of a row of it, or of one element."""
    row = tensor.detach()[chance.randrange(len(tensor))]
    return row if chance.random() < 0.5 else row.view(-1)[chance.randrange(row.numel()) :][:1]


@TABLE.escapes(Detection.COUNTER)
def touch_a_row(trainer: Trainer, chance: Random) -> None:
    """Changes one row, or one element, in place."""
    for tensor in some(trainer, chance):
        if tensor.ndim == 2:
            with torch.no_grad():
                tensor[chance.randrange(len(tensor))] += 1


@TABLE.escapes(Detection.COUNTER)
def revive_dead_rows(trainer: Trainer, chance: Random) -> None:
    """Resets one dead row of a weight, and of the optimizer's slots for it."""
    parameter = chance.choice([p for p in trainer.job.large() if p.ndim == 2])
    row = chance.randrange(len(parameter))
    with torch.no_grad():
        parameter[row] = torch.randn_like(parameter[row])
        for optimizer in trainer.job.optimizers:
            for slot in optimizer.state.get(parameter, {}).values():
                if isinstance(slot, torch.Tensor) and slot.shape == parameter.shape:
                    slot[row] = 0.25


@TABLE.escapes(Detection.COUNTER)
def index_copy(trainer: Trainer, chance: Random) -> None:
    """Writes a few rows by index_copy_ and masked_fill_."""
    with torch.no_grad():
        for tensor in some(trainer, chance):
            if tensor.ndim != 2:
                continue
            rows = torch.tensor(sorted(chance.sample(range(len(tensor)), 3)))
            if chance.random() < 0.5:
                tensor.index_copy_(0, rows, torch.ones(3, tensor.shape[1], dtype=tensor.dtype))
            else:
                mask = torch.zeros(len(tensor), 1, dtype=torch.bool)
                mask[rows] = True
                tensor.masked_fill_(mask, 7)


@TABLE.escapes(Detection.COUNTER)
def touch_a_view(trainer: Trainer, chance: Random) -> None:
    """Changes one element through a view that was created long before."""
    for tensor in some(trainer, chance):
        view = _few(tensor, chance)
        view.add_(1)


@TABLE.escapes(Detection.EXACT)
def touch_a_row_through_data(trainer: Trainer, chance: Random) -> None:
    """Changes one row through .data."""
    for tensor in watched(trainer, chance):
        _few(tensor.data, chance).data.add_(1)


@TABLE.escapes(Detection.EXACT)
def touch_a_byte(trainer: Trainer, chance: Random) -> None:
    """Changes one byte by its address."""
    for tensor in watched(trainer, chance):
        position = tensor.data_ptr() + chance.randrange(tensor.nbytes)
        (ctypes.c_uint8 * 1).from_address(position)[0] ^= 1


@TABLE.escapes(Detection.EXACT)
def touch_through_numpy(trainer: Trainer, chance: Random) -> None:
    """Changes one element through a numpy array."""
    for tensor in watched(trainer, chance):
        if tensor.dtype == torch.float32:
            tensor.detach().numpy().reshape(-1)[chance.randrange(tensor.numel())] += 1


# Other tensors in their place: the old ones are held until they are captured


@TABLE.quiet()
def replace_data(trainer: Trainer, chance: Random) -> None:
    """Replaces the memory of parameters by `.data = other`, and changes the new memory."""
    for parameter in chance.sample(trainer.job.large(), 2):
        parameter.data = parameter.data.clone().add_(1)


@TABLE.quiet()
def swap_data(trainer: Trainer, chance: Random) -> bool | None:
    """Two parameters exchange their memory."""
    layers = [layer for layer in trainer.job.model.body if type(layer) is nn.Linear and not is_parametrized(layer)]
    weights = [layer.weight for layer in layers]
    if len(weights) < 2 or weights[0].dtype != weights[1].dtype:
        return False
    first, two = weights[:2]
    first.data, two.data = two.data, first.data
    return None


@TABLE.escapes(Detection.COUNTER)
def swap_tensors(trainer: Trainer, chance: Random) -> None:
    """torch.utils.swap_tensors replaces parameters by new ones, and the old ones are dropped."""
    parameter = chance.choice(trainer.job.large())
    parameter.grad = None
    other = nn.Parameter(torch.randn_like(parameter), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)
    del other
    _ = torch.full_like(parameter, 9)  # at the old address, if nothing refers to it any more


@TABLE.escapes(Detection.COUNTER)
def set_source(trainer: Trainer, chance: Random) -> None:
    """tensor.set_() replaces the storage of parameters, and the new storage is changed."""
    parameter = chance.choice(trainer.job.large())
    with torch.no_grad():
        parameter.set_(torch.randn_like(parameter))
        parameter.add_(1)


@TABLE.quiet()
def replace_slots(trainer: Trainer, chance: Random) -> bool | None:
    """Replaces tensors in an optimizer's slots, and changes the new ones."""
    for optimizer in trainer.job.optimizers:
        for slots in optimizer.state.values():
            for key, value in slots.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    slots[key] = value + 1
    return None if trainer.job.slots() else False


@TABLE.quiet()
def offload_and_back(trainer: Trainer, chance: Random) -> None:
    """Moves weights to other memory and back to a third, and drops the old memory, like offloaders."""
    for parameter in trainer.job.large():
        away = parameter.data.to(torch.float64)
        parameter.data = torch.empty(0, dtype=parameter.dtype)
        parameter.data = away.to(parameter.dtype)


@TABLE.quiet()
def change_what_is_not_lazy(trainer: Trainer, chance: Random) -> None:
    """Changes buffers, small parameters and plain values. With fence="auto", they are captured before save returns."""
    job = trainer.job
    trainer.escapes("change-what-is-not-lazy", lambda value: value.fence == "manual")  # captured late only then
    with torch.no_grad():
        for buffer in job.model.buffers():
            buffer.add_(1)
        for parameter in job.model.parameters():
            if parameter.nbytes < 64 * 1024:
                parameter.data.add_(1)
    for value in job.state.values():
        if isinstance(value, torch.Tensor):
            value.add_(1)


def is_parametrized(layer: nn.Module) -> bool:
    return hasattr(layer, "parametrizations") or not isinstance(layer._parameters.get("weight"), nn.Parameter)
