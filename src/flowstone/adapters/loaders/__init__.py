"""Resumable data loaders, on any number of ranks.

    state = {"model": model, "optimizer": optimizer, "loader": resumable(loader), "step": 0}

docs/LOADERS.md lists the supported loaders, and says how their samples are redistributed on another number of ranks.
Packages of loaders (torchdata, datasets) are never imported here, as the caller has imported them.
"""

from __future__ import annotations

from flowstone.adapters.loaders.recognition import resumable

__all__ = ["resumable"]
