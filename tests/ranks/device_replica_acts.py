"""Functions that ranks run in tests of replicas on devices, each rank with a simulated one of its own."""

from __future__ import annotations

import torch
from acts import outcome

import flowstone as fs
from flowstone.config import Watch
from simulated_device import SimulatedDevice, visible_device

MIB = 1 << 20
LENGTHS = {"large": 3 * MIB, "long": 2 * MIB, "ragged": MIB + 100, "small": 5000, "tiny": 3}
PLACES: dict[str, int | tuple[int, int]] = {
    "large": 2 * MIB + 345_678, "long": MIB + 12_345, "ragged": MIB + 77, "small": 4_001, "tiny": 2,
    "turned": (700, 901),
}


def numbers(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64).mul_(2654435761).to(torch.uint8)


def replicas(far: SimulatedDevice | None) -> dict[str, torch.Tensor]:
    """Alike on every rank; on the device, if there is one. One of them is strided."""
    made = {name: numbers(size) for name, size in LENGTHS.items()} | {"turned": numbers(1500 * 1100).view(1100, 1500)}
    made = made if far is None else {name: far.tensor(tensor) for name, tensor in made.items()}
    return made | {"turned": made["turned"].t()}


def opened(path: str, watch: Watch) -> fs.Checkpointer:
    engine = fs.EngineOptions(request_bytes=2 * MIB, watch=watch)
    return fs.Checkpointer(path, engine=engine, budget_bytes=64 * MIB, on_error="continue", max_unsaved_steps=None)


def one_byte_differs(rank: int, path: str, watch: Watch) -> dict[str, str]:
    """Of each tensor one byte is another one on rank 1, for one save; what is told of that save."""
    with visible_device(SimulatedDevice(64 * MIB)) as far, opened(path, watch) as saver:
        far.sync = False
        state, reported = replicas(far), {}
        for step, (name, place) in enumerate(PLACES.items()):
            if rank:
                state[name].data[place] ^= 1
            reported[name] = str(outcome(saver, 2 * step, {"x": state}))
            if rank:
                state[name].data[place] ^= 1
            reported[name] += f" / {outcome(saver, 2 * step + 1, {'x': state})}"
    return reported


def save_waits_for_nothing(rank: int, path: str) -> list[bool]:
    """Whether `save` returned while the device stood still, without a copy; and what it led to."""
    with visible_device(SimulatedDevice(64 * MIB)) as far, opened(path, "digests") as saver:
        far.sync = False
        state = {"x": replicas(far)}
        saver.prepare(state)
        made = far.native.host_allocations
        saver.save(0, state, fence="manual").committed.result(60)
        copied = far.native.copied_bytes
        far.native.hold(True)
        save = saver.save(1, state, fence="manual")
        is_idle = far.native.copied_bytes == copied
        far.native.hold(False)
        save.committed.result(60).verify()
        written = far.native.copied_bytes - copied
        return [is_idle, written < sum(LENGTHS.values()), far.native.host_allocations == made]


def ranks_are_not_alike(rank: int, path: str, how: str) -> list[str]:
    """Rank 1 has its replicas, or some, on the host, or a device that digests nothing, or is told to sample."""
    with visible_device(SimulatedDevice(64 * MIB)) as far:
        far.sync = False
        state = replicas(None if rank and how == "host" else far)
        if rank and how == "partly":
            state["long"] = state["long"].clone()
        if rank and how == "refused":
            far.native.limit_pinned(0)
        with opened(path, "auto" if rank and how == "sampled" else "digests") as saver:
            reported = [str(outcome(saver, step, {"x": state})) for step in (0, 1)]
            if rank:
                state["large"].data[: 2 * MIB] += 1
            return [*reported, str(outcome(saver, 2, {"x": state}))]
