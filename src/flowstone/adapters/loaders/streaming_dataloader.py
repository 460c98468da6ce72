"""MosaicML's StreamingDataLoader: a place that is the same on all ranks, and that any number of them can go on from.

Its state counts the samples of all ranks together, and the order of an epoch is made anew from that, the seed and the
number of canonical nodes. So nothing has to be divided here; what a load has to know is that the order is the same, and
that the ranks have kept step.
"""

from __future__ import annotations

from typing import Any, Final

from flowstone.adapters.loaders.saved import OTHER_ORDER, refuse_changes, refuse_disagreement, require_known, state_of
from flowstone.errors import UnsupportedStateError

KIND: Final = "streaming.StreamingDataLoader"
VERSIONS: Final = ("0.13.0",)
CLASS: Final = "streaming.base.dataloader.StreamingDataLoader"
_DATASET: Final = "streaming.base.dataset.StreamingDataset"


class StreamingDataLoaderState:
    """What a checkpoint holds of a StreamingDataLoader. The state of a rank is a dict:

        kind, version  KIND, of mosaicml-streaming
        made_of        what decides on the order of samples; see `_made_of`
        loader         its own state
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._version = require_known("mosaicml-streaming", VERSIONS)
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(loader.dataset).__mro__]
        if _DATASET not in kinds:
            raise UnsupportedStateError(
                f"a StreamingDataLoader of a {kinds[0]} cannot be resumed: it has a state of a StreamingDataset alone",
                next="give it a StreamingDataset, or use StatefulDataLoader of torchdata",
            )

    def state_dict(self) -> dict[str, Any]:
        place = self._loader.state_dict()  # which settles what `_made_of` tells
        return {"kind": KIND, "version": self._version, "made_of": _made_of(self._loader.dataset), "loader": place}

    def load_state_dict(self, state: object) -> None:
        """Raises StateError if the loader cannot go on exactly where the saved one was."""
        saved, dataset = state_of(state, KIND, VERSIONS), self._loader.dataset
        was, now = saved["made_of"], _made_of(dataset)
        # What a loader leaves open is settled later: only what is set on both sides can differ.
        refuse_changes(was, now, [name for name in was if None not in (was[name], now[name])], OTHER_ORDER)
        place = saved["loader"]
        self._loader.load_state_dict(place)
        # A state of an earlier epoch than the dataset is in would be taken for one that was used up.
        dataset.next_epoch = max(0, place["epoch"])
        self._loader.num_samples_yielded = 0  # what it has yielded before does not count from the new place

    def redistribute(self, states: list[object], rank: int, ranks: int) -> dict[str, Any]:
        """The state of any rank: all have the same place.

        raises  StateError  the ranks that saved were not equally far
        """
        saved = [state_of(one, KIND, VERSIONS) for one in states]
        refuse_disagreement([one["made_of"] | one["loader"] for one in saved], saved[0]["made_of"] | saved[0]["loader"])
        return saved[0]


def _made_of(dataset: Any) -> dict[str, Any]:
    """What decides on the order of samples, besides what the loader's own state holds and restores."""
    return {
        "samples": [int(count) for count in dataset.samples_per_stream], "epoch_size": int(dataset.epoch_size),
        "sampling": f"{dataset.sampling_method}, {dataset.sampling_granularity}", "batching": dataset.batching_method,
        "shuffle": dataset.shuffle_algo if dataset.shuffle else "none",
        "shuffle_block_size": dataset.shuffle_block_size, "replication": dataset.replication or 1,
    }
