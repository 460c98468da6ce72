"""Ray Train through Flowstone: each report names a complete, durable checkpoint, and training resumes from it.

    with fs.Checkpointer(run_store()) as ckpt:
        load(ckpt, state)                                 # replaces get_checkpoint and torch.load
        report({"loss": loss}, ckpt.save(step, state))    # replaces ray.train.report

docs/RAY.md has the lines to change, and the differences. Ray is imported by the first call.
"""

from __future__ import annotations

from flowstone.adapters.ray.train import load, report, run_store

__all__ = ["load", "report", "run_store"]
