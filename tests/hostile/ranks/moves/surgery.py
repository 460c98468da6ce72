"""Changes that ranks make to tensors between a save and the next step, on some ranks alone."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch

from hostile.moves import surgery
from hostile.ranks.moves.move import Table, some_rank
from hostile.ranks.states import EVERYWHERE

if TYPE_CHECKING:
    from hostile.ranks.loop import Loop

TABLE = Table()
WAYS = (
    "add_in_place", "add_through_data", "add_through_numpy", "fill_by_address", "restore_by_copy", "touch_a_row",
    "index_copy", "touch_a_view", "touch_a_row_through_data", "touch_a_byte", "touch_through_numpy",
)


@dataclass
class OneRank:
    """The methods of a trainer that moves of one rank need: tensors that are captured lazily."""

    tensors: list[torch.Tensor]

    @property
    def job(self) -> OneRank:
        return self

    def lazy(self) -> list[torch.Tensor]:
        return self.tensors


def _often_known(loop: Loop, chance: Random) -> None:
    """Most changes happen with a known plan, some while a new layout is planned."""
    if chance.random() < 0.7:
        loop.make_known()


@TABLE.move(weight=4)
def change_on_one_rank(loop: Loop, chance: Random) -> None:
    """One rank changes tensors during their capture by a move of one rank, and reverts the changes afterwards."""
    victim = some_rank(loop, chance)
    _often_known(loop, chance)
    way = chance.choice(WAYS)
    loop.save()
    if loop.rank == victim:
        tensors = loop.job.lazy()
        kept = [tensor.clone() for tensor in tensors]
        if tensors:
            loop.escapes(way)
            getattr(surgery, way)(OneRank(tensors), chance)
        loop.call("fence", loop.checkpointer.fence)
        with torch.no_grad():
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)
    loop.known = False


@TABLE.move(weight=2)
def change_on_all(loop: Loop, chance: Random) -> None:
    """All ranks change their tensors in the same way, without calling fence(), during their capture."""
    _often_known(loop, chance)
    loop.save()
    with torch.no_grad():
        tensors = loop.job.lazy()
        if tensors:
            loop.escapes("change-on-all")
        for tensor in tensors:
            tensor.data.add_(1)
    loop.known = False


@TABLE.move()
def change_parts(loop: Loop, chance: Random) -> None:
    """One rank changes tensors that only it holds, during their capture; the state keeps the new values."""
    victim = some_rank(loop, chance)
    _often_known(loop, chance)
    way = chance.choice(WAYS)
    loop.save()
    tensors = loop.job.lazy(replicas=False)
    if loop.rank == victim and tensors:
        loop.escapes(way)
        getattr(surgery, way)(OneRank(tensors), chance)
    loop.known = False


@TABLE.move()
def free_on_one_rank(loop: Loop, chance: Random) -> None:
    """Memory of one rank is freed during its capture, and restored, like by offloaders."""
    victim, position = some_rank(loop, chance), chance.random()
    loop.make_known()
    loop.save()
    result = [tensor.untyped_storage() for tensor in loop.job.lazy()]
    result = [storage for storage in result if storage.resizable() and not storage.is_shared()]
    if loop.rank == victim and result:
        storage = result[int(position * len(result))]
        kept, size = storage.clone(), storage.nbytes()
        loop.escapes("free-on-one-rank")
        storage.resize_(0)
        loop.call("fence", loop.checkpointer.fence)
        storage.resize_(size)
        storage.copy_(kept)
    loop.known = False


@TABLE.move(weight=2)
def drift(loop: Loop, chance: Random) -> None:
    """Replicas of some ranks drift completely: saves fail by name until they are equal again."""
    ranks = chance.sample(range(loop.size), chance.randint(1, loop.size - 1)) if loop.size > 1 else []
    replicas = [
        part.local for part in loop.job.parts()
        if part.holding == "replica" and part.name.split(".")[0] in EVERYWHERE and part.local.is_floating_point()
        and part.local.numel() > 100
    ]
    loop.call("fence", loop.checkpointer.fence)
    if not replicas or not ranks:
        return
    loop.make_known()  # the first save of a new layout may miss a difference
    loop.drifted, loop.known = True, False
    with torch.no_grad():
        for tensor in replicas if loop.rank in ranks else ():
            tensor.mul_(1.5).add_(1)
    for _ in range(chance.randint(1, 2)):
        loop.save()


@TABLE.move()
def make_alike(loop: Loop, chance: Random) -> None:
    """Replicas get the values of rank 0 again."""
    loop.made_alike()
