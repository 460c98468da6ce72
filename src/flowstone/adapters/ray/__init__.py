"""Ray Train through Flowstone: a report names a checkpoint that is whole and durable, and training resumes from it.

    with fs.Checkpointer(run_store()) as ckpt:
        load(ckpt, state)                                 # in the place of get_checkpoint and torch.load
        report({"loss": loss}, ckpt.save(step, state))    # in the place of ray.train.report

docs/RAY.md has the lines to change, and what differs. Ray is imported with the first call.
"""

from __future__ import annotations

from flowstone.adapters.ray.train import load, report, run_store

__all__ = ["load", "report", "run_store"]
