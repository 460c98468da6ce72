"""Hugging Face's transformers Trainer, Accelerate and PEFT through Flowstone.

    trainer = use_flowstone(Trainer(model=model, args=args, train_dataset=data))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))

Nothing else changes; docs/TRANSFORMERS.md has the lines to change, and the differences.
"""

from flowstone.adapters.huggingface.use import get_last_checkpoint, use_flowstone

__all__ = ["get_last_checkpoint", "use_flowstone"]
