"""Data loaders that resume with the training, on any number of ranks.

    state = {"model": model, "optimizer": optimizer, "loader": resumable(loader), "step": 0}

docs/LOADERS.md says which loaders are known, and what becomes of their samples on another number of ranks. What a
loader comes from (torchdata, datasets) is never imported here: the loader is there already.
"""

from __future__ import annotations

from flowstone.adapters.loaders.recognition import resumable

__all__ = ["resumable"]
