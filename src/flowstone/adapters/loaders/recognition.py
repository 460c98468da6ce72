"""Which adapter is for which loader, by the names of its classes: none of their packages is imported here."""

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
    """A section of a state that resumes a data loader exactly, also on another number of ranks.

    loader   torchdata's StatefulDataLoader, MosaicML's StreamingDataLoader, or an IterableDataset of Hugging Face's
             datasets: the object itself that the training iterates over
    returns  put it into the state that is saved and loaded, on every rank
    raises   UnsupportedStateError  a loader that is not known, or that cannot be resumed exactly; it says why
             FrameworkError  the version of its package is not known

    A load raises StateError where samples would be repeated or left out: the data, the sampler or its seed have
    changed, or what is left does not divide among the ranks.
    """
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(loader).__mro__]
    for kind in kinds:
        if kind in _ADAPTERS:
            state = _ADAPTERS[kind](loader)
            return PerRank(state, redistribute=state.redistribute)
    raise UnsupportedStateError(
        f"a {kinds[0]} is no loader that resumable() knows",
        next="hand over a StatefulDataLoader of torchdata, a StreamingDataLoader or an IterableDataset of datasets; a "
        "loader with a state_dict() of its own goes into the state as it is, in fs.PerRank if it differs between ranks"
        if _PLAIN not in kinds or hasattr(loader, "state_dict")
        else "use StatefulDataLoader of torchdata, which takes the arguments of DataLoader",
    )
