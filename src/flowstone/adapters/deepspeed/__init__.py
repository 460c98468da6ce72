"""DeepSpeed through Flowstone: `save_checkpoint` writes one ordinary Flowstone checkpoint for all ranks.

    engine, optimizer, _, _ = deepspeed.initialize(...)
    flowstone.adapters.deepspeed.attach(engine)
    engine.save_checkpoint("runs/gpt")
    engine.load_checkpoint("runs/gpt")

`attach` replaces the engine's `CheckpointEngine`. DeepSpeed still decides what each rank saves; docs/DEEPSPEED.md has
the lines to change, and the differences. Jobs with `datastates_ckpt` in DeepSpeed's configuration call
`fill_datastates_slot()` before `deepspeed.initialize` instead.
"""

from flowstone.adapters.deepspeed.attaching import attach
from flowstone.adapters.deepspeed.slot import fill_datastates_slot

__all__ = ["attach", "fill_datastates_slot"]
