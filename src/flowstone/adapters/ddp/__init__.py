"""Compressed gradients for DistributedDataParallel. A journal (`every_step`) logs such gradients in compressed form.

    compression = TopKGradients(model, ratio=0.01)
    model.register_comm_hook(compression, exchange)

docs/COMPRESSED_GRADIENTS.md says what is restored after a crash. torch.distributed is imported on first use of a name
that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowstone.adapters.ddp.compression import exchange
    from flowstone.adapters.ddp.int8 import Int8Gradients
    from flowstone.adapters.ddp.top_k import TopKGradients

_HOMES = {"exchange": "compression", "Int8Gradients": "int8", "TopKGradients": "top_k"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = ["Int8Gradients", "TopKGradients", "exchange"]
