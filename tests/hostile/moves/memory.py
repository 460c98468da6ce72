"""Operations of loops and libraries on memory itself: it moves, is truncated, or becomes unreadable."""

from __future__ import annotations

import ctypes
import mmap
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.multiprocessing  # registers how tensors are sent
from torch import nn

from hostile.moves.move import Detection, Table

if TYPE_CHECKING:
    from hostile.trainer import Trainer

TABLE = Table()


def _resizable(trainer: Trainer) -> list[nn.Parameter]:
    return [parameter for parameter in trainer.job.large() if _is_resizable(parameter)]


def _is_resizable(tensor: torch.Tensor) -> bool:
    """Torch also calls shared storages resizable, but resizing one to zero and back kills the process."""
    storage = tensor.untyped_storage()
    return storage.resizable() and not storage.is_shared()


_LIBC = ctypes.CDLL(None, use_errno=True)


@TABLE.escapes(Detection.MEMORY)
def share_memory(trainer: Trainer, chance: Random) -> None:
    """model.share_memory(): every storage moves, in place, into shared memory."""
    trainer.job.model.share_memory()


@TABLE.escapes(Detection.MEMORY)
def put_into_a_queue(trainer: Trainer, chance: Random) -> None:
    """A torch.multiprocessing queue moves the tensors that are put into it to shared memory."""
    ForkingPickler.dumps(trainer.job.model.state_dict())
    trainer.at_the_end.append(resource_sharer.stop)  # a thread of torch's, which these tests do not check


@TABLE.escapes(Detection.MEMORY)
def free_and_allocate(trainer: Trainer, chance: Random) -> None:
    """untyped_storage().resize_(0) and back, like FSDP and offloaders, with other memory and the same values."""
    for parameter in _resizable(trainer)[:2]:
        storage, kept = parameter.untyped_storage(), parameter.detach().clone()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        parameter.data.copy_(kept)


@TABLE.escapes(Detection.MEMORY)
def free_until_needed(trainer: Trainer, chance: Random) -> bool | None:
    """untyped_storage().resize_(0); the memory is restored only after captures have found that it is gone."""
    result = _resizable(trainer)
    if not result:
        return False
    parameter = chance.choice(result)
    storage, kept = parameter.untyped_storage(), parameter.detach().clone()
    size = storage.nbytes()
    storage.resize_(0)
    trainer.call("fence", trainer.checkpointer.fence)
    storage.resize_(size)
    parameter.data.copy_(kept)
    return None


@TABLE.escapes(Detection.MEMORY, needs="slots")
def grow_in_place(trainer: Trainer, chance: Random) -> bool | None:
    """A slot's storage grows in place, which moves it."""
    slots = [slot for slot in trainer.job.slots() if _is_resizable(slot)]
    if not slots:
        return False
    storage = chance.choice(slots).untyped_storage()
    storage.resize_(storage.nbytes() * 40)
    return None


@TABLE.escapes(Detection.MEMORY, needs="array")
def resize_array(trainer: Trainer, chance: Random) -> bool | None:
    """numpy's resize of an array of the state, in place, without checking references to it."""
    array = trainer.job.state.get("array")
    if array is None:
        return False
    array.resize(array.size * 30, refcheck=False)
    trainer.job.state["array"] = array[:30_000].copy()
    return None


class Mapped:
    """A parameter's memory in a map of our own, which can be unmapped."""

    def __init__(self, trainer: Trainer, parameter: torch.Tensor) -> None:
        self.bytes = -(-parameter.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.map = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        dense = parameter.detach().contiguous()
        tensor = torch.frombuffer(self.map, dtype=parameter.dtype, count=parameter.numel()).view(parameter.shape)
        tensor.copy_(dense)
        self.parameter, self.tensor = parameter, tensor
        parameter.data = tensor
        trainer.mapped.append(self)

    def intact(self) -> bool:
        return self.parameter.data_ptr() == self.tensor.data_ptr()

    def call(self, function: str, *arguments: Any) -> None:
        address = ctypes.c_void_p(self.tensor.data_ptr())
        if getattr(_LIBC, function)(address, ctypes.c_size_t(self.bytes), *arguments):
            raise OSError(ctypes.get_errno(), function)


@TABLE.quiet(weight=2)
def map_memory(trainer: Trainer, chance: Random) -> None:
    """Another process maps a parameter's memory from here on."""
    parameter = chance.choice([p for p in trainer.job.large() if isinstance(p, nn.Parameter)])
    Mapped(trainer, parameter)


def _mapped_and_saved(trainer: Trainer, chance: Random, name: str) -> Mapped:
    """A parameter with mapped memory. If there is none yet: map one, and begin to save it."""
    result = [item for item in trainer.mapped if item.intact()]
    if not result:
        map_memory(trainer, chance)
        trainer.save()
        trainer.escapes(name)
        result = [trainer.mapped[-1]]
    return chance.choice(result)


@TABLE.escapes(Detection.MEMORY)
def forbid_reading(trainer: Trainer, chance: Random) -> None:
    """Mapped memory becomes unreadable during a capture: mprotect."""
    mapped = _mapped_and_saved(trainer, chance, "forbid-reading")
    mapped.call("mprotect", 0)
    trainer.call("fence", trainer.checkpointer.fence)
    mapped.call("mprotect", mmap.PROT_READ | mmap.PROT_WRITE)


@TABLE.escapes(Detection.SAMPLES)
def drop_pages(trainer: Trainer, chance: Random) -> None:
    """Mapped memory is discarded, and reads as zeros: madvise."""
    _mapped_and_saved(trainer, chance, "drop-pages").call("madvise", mmap.MADV_DONTNEED)


@TABLE.escapes(Detection.MEMORY, weight=0.5)
def cut_a_file(trainer: Trainer, chance: Random) -> bool | None:
    """A frozen array of the state is in a mapped file, which is truncated: reading it raises SIGBUS."""
    path = trainer.root.parent / f"{trainer.root.name}.array"
    array = np.memmap(path, np.float64, "w+", shape=(40_000,))
    array[:] = chance.random()
    trainer.job.state["mapped"] = array
    trainer.save("manual")
    trainer.escapes("cut-a-file")
    with open(path, "r+b") as file:
        file.truncate(4096)
    trainer.job.state["mapped"] = np.zeros(10)
    path.unlink()
    return None
