"""One rank of the training as a process: `python -m flowstone_demo.rank ORDER`.

The environment has rank, number of ranks and rendezvous, as under torchrun. The process trains twice: first to the end
without saves, then from the store's newest step. In the second run it may be killed.
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
from flowstone.events.phases import Committed, Event, SaveFailed
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
from flowstone_demo.train import KEEP, Training, is_saved, run_steps

COLLECTIVE_MAX_S = 120.0  # seconds; on a busy machine, ranks start at very different times
KILLED_WITHIN_S = 60.0


def main(argument: str) -> None:
    order = msgspec.json.decode(argument, type=RankOrder)
    kind = meet()
    undisturbed = kind(order.form, order.seed)
    for step in range(1, order.form.steps + 1):
        tell(Undisturbed(step, undisturbed.train_step()))
    run = kind(order.form, order.seed)
    with fs.Checkpointer(order.store, keep=KEEP, deadline_s=order.form.deadline_s, on_event=on_event) as ckpt:
        try:
            train(run, order, ckpt)
        except RuntimeError:  # from torch: a collective failed, without naming the rank that caused it
            name_the_lost(ckpt)
            raise
    tell(Finished(order.form.steps, *fingerprint(run)))
    sys.stderr.flush()
    # With torch 2.13, gloo aborts one of eight processes while the interpreter ends.
    os._exit(0)


def meet() -> type[Training]:
    """Connect to the other ranks. Returns the class to train with; a single rank trains without torch.distributed."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if size == 1:
        return Training
    from flowstone_demo.sharded import Sharded  # imported here, as the import of FSDP2 takes a second

    store = TCPStore(os.environ["MASTER_ADDR"], port, None, False, use_libuv=False)
    timeout = timedelta(seconds=COLLECTIVE_MAX_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return Sharded


def train(run: Training, order: RankOrder, ckpt: fs.Checkpointer) -> None:
    last = order.form.steps

    def on_start(step: int | None) -> None:
        tell(Began(step, sum(parameter.numel() for parameter in run.model.parameters()), 0.0))
        if step is not None:
            if order.flip_bit:
                flip_bit_of_rank_0(run)
            send_digests(run, step, loaded=True)

    def on_step(step: int, loss: float) -> None:
        tell(Stepped(step, loss))
        if is_saved(step, last, order.form.save_every):
            send_digests(run, step, loaded=False)
            tell(Saving(step))
            if is_victim(order.form, step):
                time.sleep(KILLED_WITHIN_S)  # waits for the supervisor's SIGKILL, which must not come after the save

    run_steps(run, ckpt, save_every=order.form.save_every, on_start=on_start, on_step=on_step)


def is_victim(form: RankDemoSize, step: int) -> bool:
    """Whether this rank is to be killed when it begins to save `step`."""
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


def send_digests(run: Training, step: int, *, loaded: bool) -> None:
    for name, sha256, count in digests(run):
        tell(Held(step, loaded, name, sha256, count))


def on_event(event: Event) -> None:
    """Called on the thread that commits. That thread gets the error about a dead rank, even if this rank hangs in a
    collective operation.
    """
    match event:
        case Committed(step, bytes, seconds):
            tell(SaveCommitted(step, bytes, seconds))
        case SaveFailed(_, reason):
            lost(reason)


def name_the_lost(ckpt: fs.Checkpointer) -> None:
    """Call a method of the Checkpointer that needs all ranks; its error names the dead rank."""
    try:
        ckpt.latest()
    except fs.RankError as error:
        lost(str(error))


def lost(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
    tell(Lost(words.splitlines()[0]))
    os._exit(LOST)  # without waiting, as this rank may hang in gloo, waiting for a rank that has ended


if __name__ == "__main__":
    main(sys.argv[1])
