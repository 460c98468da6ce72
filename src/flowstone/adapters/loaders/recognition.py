"""Chooses the adapter for a loader by the names of the loader's classes, without importing its package."""

from __future__ import annotations

from typing import Any

from flowstone.adapters.loaders.iterable_dataset import CLASS, IterableDatasetState
from flowstone.adapters.loaders.stateful_dataloader import StatefulDataLoaderState
from flowstone.adapters.loaders.streaming_dataloader import CLASS as STREAMING_CLASS
from flowstone.adapters.loaders.streaming_dataloader import StreamingDataLoaderState
from flowstone.errors import UnsupportedStateError
from flowstone.state import PerRank

_ADAPTERS: dict[str, Any] = {
    "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader": StatefulDataLoaderState,
    CLASS: IterableDatasetState,
    STREAMING_CLASS: StreamingDataLoaderState,
}
_PLAIN = "torch.utils.data.dataloader.DataLoader"


def resumable(loader: object) -> PerRank:
    """A section of the state that resumes a data loader exactly, also on another number of ranks.

    loader   torchdata's StatefulDataLoader, MosaicML's StreamingDataLoader, or an IterableDataset of Hugging Face's
             datasets: the object that the training iterates over
    returns  a section for the state that is saved and loaded, on every rank
    raises   UnsupportedStateError  the loader is of an unknown class, or cannot be resumed exactly; the error says why
             FrameworkError  the version of the loader's package is unknown

    A load raises StateError if samples would be repeated or lost, because the data, the sampler or its seed have
    changed, or because the remaining samples cannot be divided among the ranks.
    """
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(loader).__mro__]
    for kind in kinds:
        if kind in _ADAPTERS:
            state = _ADAPTERS[kind](loader)
            return PerRank(state, redistribute=state.redistribute)
    raise UnsupportedStateError(
        f"resumable() does not support a {kinds[0]}",
        next="give a StatefulDataLoader of torchdata, a StreamingDataLoader, or an IterableDataset of datasets; or put "
        "a loader with its own state_dict() into the state directly, in fs.PerRank if its state differs by rank"
        if _PLAIN not in kinds or hasattr(loader, "state_dict")
        else "use StatefulDataLoader of torchdata, which takes the arguments of DataLoader",
    )
