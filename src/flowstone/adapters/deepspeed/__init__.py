"""DeepSpeed through Flowstone: `save_checkpoint` writes an ordinary Flowstone checkpoint, of all ranks at once.

    engine, optimizer, _, _ = deepspeed.initialize(...)
    flowstone.adapters.deepspeed.attach(engine)
    engine.save_checkpoint("runs/gpt")
    engine.load_checkpoint("runs/gpt")

`attach` puts a `CheckpointEngine` of ours into the engine. Which rank saves what is DeepSpeed's part; docs/DEEPSPEED.md
has the lines to change, and what differs. Jobs that have `datastates_ckpt` in DeepSpeed's configuration call
`fill_datastates_slot()` before `deepspeed.initialize` instead.
"""

from flowstone.adapters.deepspeed.attaching import attach
from flowstone.adapters.deepspeed.slot import fill_datastates_slot

__all__ = ["attach", "fill_datastates_slot"]
