"""One process of bench/interference.py: `python -m bench.training.worker TASK.json OUTCOME.json`.

It runs in any environment with torch and msgspec: only Flowstone's own tasks import Flowstone.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import msgspec

from bench import meter
from bench.meter import Meter
from bench.state import flatten
from bench.training.records import (
    Block,
    Calibration,
    CalibrationTask,
    DrillOutcome,
    DrillTask,
    StepSample,
    TrainingOutcome,
    TrainingTask,
)
from bench.training.savers import Saver, open_saver
from bench.training.trainer import Trainer, calibrate, digests
from bench.worker import settle

WARM_UP_STEPS = 3  # torch allocates its memory, AdamW its moments
PEAK_STEPS = 2  # over which memory's high-water mark before the first save is measured
STEPS_BEHIND_LAST = 2  # between the last save and its load: a late capture would contain them


def train(task: TrainingTask) -> TrainingOutcome:
    """Leg after leg; the order of a leg's blocks alternates, so that drift affects both alike."""
    trainer, saver = Trainer(task.shape, task.window), open_saver(task.rival, Path(task.directory))
    for _ in range(WARM_UP_STEPS):
        trainer.step()
    gc.collect()
    before = _block(trainer, saver, 0, PEAK_STEPS, 0)
    saver.prepare(trainer)
    blocks: list[Block] = []
    done = 0
    for index, leg in enumerate(task.legs):
        for every in (leg.every, 0) if index % 2 else (0, leg.every):
            settle(task.settle_s)
            blocks.append(_block(trainer, saver, every, leg.steps, done))
            done += leg.steps
    differing = check_exact(trainer, saver, done + 1)
    saver.close()
    tensors = flatten(trainer.state())
    return TrainingOutcome(
        payload_bytes=sum(tensor.nbytes for tensor in tensors.values()), tensors=len(tensors),
        before_bytes=before.peak_bytes, before_shared_bytes=before.shared_bytes, blocks=tuple(blocks),
        differing=differing,
    )


def _block(trainer: Trainer, saver: Saver, every: int, steps: int, done: int) -> Block:
    """A save after the first step and every `every` steps after it: a save's remaining work falls into the block."""
    watch, samples, shared_bytes = Meter(), [], 0
    for step in range(steps):
        number, lap, save_s = done + step + 1, trainer.step(), None
        if every and step % every == 0:
            started = time.monotonic()
            saver.save(trainer, number)
            save_s = time.monotonic() - started
        samples.append(StepSample(number, lap.seconds + (save_s or 0.0), lap.optimizer_s, save_s))
        shared_bytes = max(shared_bytes, meter.shared_bytes())
    started = time.monotonic()
    saver.drain()
    drain_s = time.monotonic() - started
    reading = watch.read()
    return Block(
        every, tuple(samples), tuple(saver.samples()), drain_s, reading.cpu_s, reading.peak_bytes,
        max(shared_bytes, meter.shared_bytes()),
    )


def check_exact(trainer: Trainer, saver: Saver, number: int) -> tuple[str, ...]:
    """Save, train on, load back: the tensors that differ from their values when `save` was called."""
    trainer.step()
    expected = digests(flatten(trainer.state()))
    saver.save(trainer, number)
    for _ in range(STEPS_BEHIND_LAST):
        trainer.step()
    saver.drain()
    failed = [sample.error for sample in saver.samples() if sample.error is not None]
    if failed:
        return (f"nothing: the last save failed: {failed[0]}",)
    saver.load(trainer, number)
    actual = digests(flatten(trainer.state()))
    return tuple(name for name in expected if actual[name] != expected[name])


def perform(task: CalibrationTask | TrainingTask | DrillTask) -> Calibration | TrainingOutcome | DrillOutcome:
    if isinstance(task, CalibrationTask):
        return calibrate(task)
    if isinstance(task, TrainingTask):
        return train(task)
    from bench.training.drill import drill  # imports Flowstone

    return drill(task)


def main(task_path: str, outcome_path: str) -> None:
    kinds = {kind.__name__: kind for kind in (CalibrationTask, TrainingTask, DrillTask)}
    named = msgspec.json.decode(Path(task_path).read_bytes(), type=dict[str, msgspec.Raw])
    (name, fields), = named.items()
    Path(outcome_path).write_bytes(msgspec.json.encode(perform(msgspec.json.decode(fields, type=kinds[name]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
