"""A training run that can be killed at any time, as a user of Flowstone would write it.

`Training.state` has everything on which the continuation of the run depends. `train` continues from the newest
committed checkpoint, or starts at step 0 if there is none. So the first start and every restart make the same call.
`run_steps` is the training loop, for one process and for many.
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
from flowstone.events.phases import OnEvent
from flowstone_demo import corpus
from flowstone_demo.gpt import BYTES, GPT
from flowstone_demo.sizes import Sizes

KEEP = fs.Keep(last=2)


class Training:
    """The objects of a training run, initialized from `seed`: the same seed makes equal objects."""

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
        """The content of a checkpoint. If any of these values were missing, the run would continue differently."""
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader,
            "rng": fs.rng(), "losses": self.losses, "step": step,
        }

    def train_step(self) -> float:
        """Make one training step. Returns its loss."""
        inputs, targets = map(self.own_rows, self.loader.draw())
        loss = functional.cross_entropy(self.model(inputs).view(-1, BYTES), targets.reshape(-1))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return self.mean(loss.detach()).item()

    # Methods for one process; sharded.py overrides them

    def shard(self) -> None: ...

    def own_rows(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def train(
    run: Training, store: Path, *, save_every: int | None, on_start: Callable[[int | None], None],
    on_step: Callable[[int, float], None], on_event: OnEvent | None = None,
) -> None:
    """Train from the newest step in `store` to the last step. The last step is always saved."""
    with fs.Checkpointer(store, keep=KEEP, on_event=on_event) as ckpt:
        run_steps(run, ckpt, save_every=save_every, on_start=on_start, on_step=on_step)


def train_every_step(
    run: Training, store: Path, *, recovery_s: float, on_start: Callable[[int | None], None],
    on_step: Callable[[int, float], None], on_saved: Callable[[int, float], None], on_event: OnEvent | None = None,
) -> None:
    """Like `train`, but each step is durable at the latest when the next step is done. `on_saved` is called with each
    step and the seconds that `save` took.
    """
    with fs.Checkpointer(store, keep=1, every_step=True, recovery_s=recovery_s, on_event=on_event) as ckpt:
        run_steps(run, ckpt, save_every=1, on_start=on_start, on_step=on_step, on_saved=on_saved)


def run_steps(
    run: Training, ckpt: fs.Checkpointer, *, save_every: int | None, on_start: Callable[[int | None], None],
    on_step: Callable[[int, float], None], on_saved: Callable[[int, float], None] | None = None,
) -> None:
    """The training loop.

    save_every  how many steps there are from one save to the next; None: only the last step is saved
    on_start    called with the step of the loaded checkpoint; None: training starts from the beginning
    on_step     called with each step and its loss, before that step is saved
    on_saved    called after each `save` has returned, with the step and the seconds that `save` took
    """
    last, done = run.form.steps, 0
    if ckpt.latest() is not None:
        done = ckpt.load(run.state(step=0)).step
    on_start(done or None)
    for step in range(done + 1, last + 1):
        loss = run.train_step()
        run.losses["train"].append(loss)
        on_step(step, loss)
        if is_saved(step, last, save_every):
            began = time.perf_counter()
            ckpt.save(step, run.state(step))  # returns immediately; the state is written during the next steps
            if on_saved is not None:
                on_saved(step, time.perf_counter() - began)


def is_saved(step: int, last: int, save_every: int | None) -> bool:
    return step == last or (save_every is not None and step % save_every == 0)


def warmup_then_cosine(step: int, form: Sizes) -> float:
    """The factor for the learning rate at `step`: it rises linearly during the warm-up, then falls along half a cosine
    to 0.1.
    """
    if step < form.warmup_steps:
        return (step + 1) / form.warmup_steps
    share = (step - form.warmup_steps) / max(1, form.steps - form.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, share)))
