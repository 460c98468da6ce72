"""DeepSpeed through Flowstone: `save_checkpoint` writes an ordinary Flowstone checkpoint, of all ranks at once.

    engine, optimizer, _, _ = deepspeed.initialize(...)
    flowstone.adapters.deepspeed.attach(engine)
    engine.save_checkpoint("runs/gpt")
    engine.load_checkpoint("runs/gpt")

`attach` puts a `CheckpointEngine` of ours into the engine. Which rank saves what is DeepSpeed's part; docs/DEEPSPEED.md
has the lines to change, and what differs.
"""

from flowstone.adapters.deepspeed.attaching import attach

__all__ = ["attach"]
