"""A training run that can be killed at any time: what a user of Flowstone writes.

`Training.state` has everything that the continuation of the run depends on. `train` begins where the newest committed
checkpoint ends, or at step 0 if there is none; the same call serves for the first start and for every restart. `go_on`
is the loop alone, for one process and for many.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

import flowstone as fs
from flowstone.events import OnEvent
from flowstone_demo import corpus
from flowstone_demo.gpt import BYTES, GPT
from flowstone_demo.sizes import Sizes

KEEP = fs.Keep(last=2)


class Training:
    """The parts of a run, new from `seed`: the same seed makes equal parts."""

    def __init__(self, form: Sizes, seed: int) -> None:
        torch.set_num_threads(form.threads)
        torch.use_deterministic_algorithms(True)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.form = form
        self.model = GPT(form)
        self.shard()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=form.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(warmup_then_cosine, form=form))
        self.loader = corpus.Loader(corpus.read(form.corpus_bytes), batch=form.batch, length=form.length, seed=seed + 1)
        self.losses: dict[str, list[float]] = {"train": []}

    def state(self, step: int) -> dict[str, object]:
        """The content of a checkpoint: without any one of these, the run would continue differently."""
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader,
            "rng": fs.rng(), "losses": self.losses, "step": step,
        }

    def learn(self) -> float:
        """Do one step; returns its loss."""
        inputs, targets = map(self.own_rows, self.loader.draw())
        loss = functional.cross_entropy(self.model(inputs).view(-1, BYTES), targets.reshape(-1))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return self.mean(loss.detach()).item()

    # One process does everything; sharded.py divides it

    def shard(self) -> None: ...

    def own_rows(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def train(
    run: Training, store: Path, *, save_every: int | None, on_start: Callable[[int | None], None],
    on_step: Callable[[int, float], None], on_event: OnEvent | None = None,
) -> None:
    """Run `run` to its last step, from the newest step in `store`; the last step is always saved."""
    with fs.Checkpointer(store, keep=KEEP, on_event=on_event) as ckpt:
        go_on(run, ckpt, save_every=save_every, on_start=on_start, on_step=on_step)


def train_every_step(
    run: Training, store: Path, *, recovery_s: float, on_start: Callable[[int | None], None],
    on_step: Callable[[int, float], None], on_saved: Callable[[int, float], None], on_event: OnEvent | None = None,
) -> None:
    """The same with each step durable, one step later at most. `on_saved` is told how long each `save` took."""
    with fs.Checkpointer(store, keep=1, every_step=True, recovery_s=recovery_s, on_event=on_event) as ckpt:
        go_on(run, ckpt, save_every=1, on_start=on_start, on_step=on_step, on_saved=on_saved)


def go_on(
    run: Training, ckpt: fs.Checkpointer, *, save_every: int | None, on_start: Callable[[int | None], None],
    on_step: Callable[[int, float], None], on_saved: Callable[[int, float], None] | None = None,
) -> None:
    """The training loop.

    save_every  steps from one save to the next; None: only the last
    on_start    called with the step of the loaded checkpoint, or None for a new start
    on_step     called with each step and its loss, before that step is saved
    on_saved    called with each step that was saved, once `save` has returned, and its seconds
    """
    last, done = run.form.steps, 0
    if ckpt.latest() is not None:
        done = ckpt.load(run.state(step=0)).step
    on_start(done or None)
    for step in range(done + 1, last + 1):
        loss = run.learn()
        run.losses["train"].append(loss)
        on_step(step, loss)
        if is_saved(step, last, save_every):
            began = time.perf_counter()
            ckpt.save(step, run.state(step))  # returns at once; the write goes on beside the next steps
            if on_saved is not None:
                on_saved(step, time.perf_counter() - began)


def is_saved(step: int, last: int, save_every: int | None) -> bool:
    return step == last or (save_every is not None and step % save_every == 0)


def warmup_then_cosine(step: int, form: Sizes) -> float:
    """The learning rate's factor at `step`: linear warm-up, then half a cosine down to a tenth."""
    if step < form.warmup_steps:
        return (step + 1) / form.warmup_steps
    share = (step - form.warmup_steps) / max(1, form.steps - form.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, share)))
