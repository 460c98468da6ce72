"""What ranks do to tensors between a save and the next step, some of them alone."""

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
    """What moves of one rank ask a trainer for: tensors that are captured lazily."""

    tensors: list[torch.Tensor]

    @property
    def job(self) -> OneRank:
        return self

    def lazy(self) -> list[torch.Tensor]:
        return self.tensors


def _often_known(loop: Loop, chance: Random) -> None:
    """Most changes meet a layout that has been shared out, some one that is shared out while they are made."""
    if chance.random() < 0.7:
        loop.make_known()


@TABLE.move(weight=4)
def change_on_one_rank(loop: Loop, chance: Random) -> None:
    """One rank changes tensors while they are captured, in one of the ways of one rank, and changes them back after."""
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
    """All change what they hold alike, without a word, while it is captured."""
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
    """One rank changes what it alone holds, while it is captured: from there on the state is another one."""
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
    """Memory of one rank goes away while it is captured, and comes back, as offloaders have it."""
    victim, at = some_rank(loop, chance), chance.random()
    loop.make_known()
    loop.save()
    found = [tensor.untyped_storage() for tensor in loop.job.lazy()]
    found = [storage for storage in found if storage.resizable() and not storage.is_shared()]
    if loop.rank == victim and found:
        storage = found[int(at * len(found))]
        kept, size = storage.clone(), storage.nbytes()
        loop.escapes("free-on-one-rank")
        storage.resize_(0)
        loop.call("fence", loop.checkpointer.fence)
        storage.resize_(size)
        storage.copy_(kept)
    loop.known = False


@TABLE.move(weight=2)
def drift(loop: Loop, chance: Random) -> None:
    """Replicas of some ranks drift away as a whole: saves fail by name, until they are alike again."""
    ranks = chance.sample(range(loop.size), chance.randint(1, loop.size - 1)) if loop.size > 1 else []
    replicas = [
        part.local for part in loop.job.parts()
        if part.holding == "replica" and part.name.split(".")[0] in EVERYWHERE and part.local.is_floating_point()
        and part.local.numel() > 100
    ]
    loop.call("fence", loop.checkpointer.fence)
    if not replicas or not ranks:
        return
    loop.make_known()  # a layout that is new may pass over a difference, once
    loop.drifted, loop.known = True, False
    with torch.no_grad():
        for tensor in replicas if loop.rank in ranks else ():
            tensor.mul_(1.5).add_(1)
    for _ in range(chance.randint(1, 2)):
        loop.save()


@TABLE.move()
def make_alike(loop: Loop, chance: Random) -> None:
    """Replicas are brought back to what rank 0 has."""
    loop.made_alike()
