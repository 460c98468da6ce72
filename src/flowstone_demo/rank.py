"""One rank of the training as a process of its own: `python -m flowstone_demo.rank ORDER`.

The environment has rank, number of ranks and meeting point, as under torchrun. It trains twice: first to the end
without saves, then from the store's newest step; the second run may be killed.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import msgspec
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in the stubs

import flowstone as fs
from flowstone.events import Committed, Event, SaveFailed
from flowstone_demo.child import flip_bit, tell
from flowstone_demo.fingerprint import digests, fingerprint
from flowstone_demo.messages import (
    LOST,
    Began,
    Finished,
    Held,
    Lost,
    RankOrder,
    SaveCommitted,
    Saving,
    Stepped,
    Undisturbed,
)
from flowstone_demo.sizes import RankDemoSize
from flowstone_demo.train import KEEP, Training, go_on, is_saved

COLLECTIVE_MAX_S = 120.0  # ranks on a busy machine start far apart
KILLED_WITHIN_S = 60.0


def main(argument: str) -> None:
    order = msgspec.json.decode(argument, type=RankOrder)
    kind = meet()
    undisturbed = kind(order.form, order.seed)
    for step in range(1, order.form.steps + 1):
        tell(Undisturbed(step, undisturbed.learn()))
    run = kind(order.form, order.seed)
    with fs.Checkpointer(order.store, keep=KEEP, deadline_s=order.form.deadline_s, on_event=on_event) as ckpt:
        try:
            learn(run, order, ckpt)
        except RuntimeError:  # from torch: a collective failed, without saying because of which rank
            name_the_lost(ckpt)
            raise
    tell(Finished(order.form.steps, *fingerprint(run)))
    sys.stderr.flush()
    # Gloo in torch 2.13 aborts one process in eight while the interpreter ends, whatever it ran.
    os._exit(0)


def meet() -> type[Training]:
    """Meet the other ranks. Returns the class to train with; one rank trains without torch.distributed."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if size == 1:
        return Training
    from flowstone_demo.sharded import Sharded  # FSDP2 takes a second to import

    store = TCPStore(os.environ["MASTER_ADDR"], port, None, False, use_libuv=False)
    timeout = timedelta(seconds=COLLECTIVE_MAX_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return Sharded


def learn(run: Training, order: RankOrder, ckpt: fs.Checkpointer) -> None:
    last = order.form.steps

    def on_start(step: int | None) -> None:
        tell(Began(step, sum(parameter.numel() for parameter in run.model.parameters()), 0.0))
        if step is not None:
            if order.flip_bit:
                flip_bit_of_rank_0(run)
            tell_held(run, step, loaded=True)

    def on_step(step: int, loss: float) -> None:
        tell(Stepped(step, loss))
        if is_saved(step, last, order.form.save_every):
            tell_held(run, step, loaded=False)
            tell(Saving(step))
            if is_victim(order.form, step):
                time.sleep(KILLED_WITHIN_S)  # wait for the supervisor's SIGKILL, which must not come after the save

    go_on(run, ckpt, save_every=order.form.save_every, on_start=on_start, on_step=on_step)


def is_victim(form: RankDemoSize, step: int) -> bool:
    """Whether this rank is to be killed as it begins to save `step`."""
    if not dist.is_initialized():
        return False
    here = dist.get_world_size(), dist.get_rank(), step
    return here == (form.ranks[0], form.victim, form.killed_saving)


def flip_bit_of_rank_0(run: Training) -> None:
    weight = next(run.model.parameters()).detach()
    if not dist.is_initialized():
        flip_bit(weight)
    elif dist.get_rank() == 0:
        from torch.distributed.tensor import DTensor

        assert isinstance(weight, DTensor), "as FSDP2 has made it"
        flip_bit(weight.to_local())


def tell_held(run: Training, step: int, *, loaded: bool) -> None:
    for name, sha256, count in digests(run):
        tell(Held(step, loaded, name, sha256, count))


def on_event(event: Event) -> None:
    """Runs on the commit thread: it learns which rank is gone even if this rank hangs in a collective."""
    match event:
        case Committed(step, bytes, seconds):
            tell(SaveCommitted(step, bytes, seconds))
        case SaveFailed(_, reason):
            lost(reason)


def name_the_lost(ckpt: fs.Checkpointer) -> None:
    """Make a call of all ranks: those that are alive learn which one is not."""
    try:
        ckpt.latest()
    except fs.RankError as error:
        lost(str(error))


def lost(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
    tell(Lost(words.splitlines()[0]))
    os._exit(LOST)  # at once: this rank may be waiting in gloo for one that is gone


if __name__ == "__main__":
    main(sys.argv[1])
