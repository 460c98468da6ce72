"""MosaicML's StreamingDataLoader. Its position is the same on all ranks, and any number of ranks can continue from
there.

Its state counts the samples of all ranks together. The loader recomputes the order of an epoch from the state, the seed
and the number of canonical nodes. So nothing has to be divided among ranks. A load only checks that the order is the
same, and that all ranks had read equally many samples.
"""

from __future__ import annotations

from typing import Any, Final

from flowstone.adapters.loaders.state_checks import (
    OTHER_ORDER,
    checked_state,
    refuse_changes,
    refuse_disagreement,
    require_known_version,
)
from flowstone.errors import UnsupportedStateError

KIND: Final = "streaming.StreamingDataLoader"
VERSIONS: Final = ("0.13.0",)
CLASS: Final = "streaming.base.dataloader.StreamingDataLoader"
_DATASET: Final = "streaming.base.dataset.StreamingDataset"


class StreamingDataLoaderState:
    """Saves and restores a StreamingDataLoader. A rank's state is a dict:

        kind, version  KIND, and the version of mosaicml-streaming
        made_of        the properties that determine the order of samples; see `_properties`
        loader         the loader's own state
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._version = require_known_version("mosaicml-streaming", VERSIONS)
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(loader.dataset).__mro__]
        if _DATASET not in kinds:
            raise UnsupportedStateError(
                f"a StreamingDataLoader over a {kinds[0]} cannot be resumed, only one over a StreamingDataset",
                next="give the loader a StreamingDataset, or use StatefulDataLoader of torchdata",
            )

    def state_dict(self) -> dict[str, Any]:
        place = self._loader.state_dict()  # this call sets the properties that `_properties` reads
        return {"kind": KIND, "version": self._version, "made_of": _properties(self._loader.dataset), "loader": place}

    def load_state_dict(self, state: object) -> None:
        """Restore a state. Raises StateError if the loader cannot continue exactly from it."""
        saved, dataset = checked_state(state, KIND, VERSIONS), self._loader.dataset
        was, now = saved["made_of"], _properties(dataset)
        # Properties that are not set yet will be set later, so only properties that are set on both sides can differ.
        refuse_changes(was, now, [name for name in was if None not in (was[name], now[name])], OTHER_ORDER)
        place = saved["loader"]
        self._loader.load_state_dict(place)
        # Otherwise the dataset would ignore the state of an earlier epoch than its current one.
        dataset.next_epoch = max(0, place["epoch"])
        self._loader.num_samples_yielded = 0  # samples that were yielded before the load do not count

    def redistribute(self, states: list[object], rank: int, ranks: int) -> dict[str, Any]:
        """The state of any of the ranks that saved, since all have the same position.

        raises  StateError  the ranks that saved were at different positions
        """
        saved = [checked_state(state, KIND, VERSIONS) for state in states]
        refuse_disagreement([own["made_of"] | own["loader"] for own in saved], saved[0]["made_of"] | saved[0]["loader"])
        return saved[0]


def _properties(dataset: Any) -> dict[str, Any]:
    """The properties that determine the order of samples, except those that the loader's own state restores."""
    return {
        "samples": [int(count) for count in dataset.samples_per_stream], "epoch_size": int(dataset.epoch_size),
        "sampling": f"{dataset.sampling_method}, {dataset.sampling_granularity}", "batching": dataset.batching_method,
        "shuffle": dataset.shuffle_algo if dataset.shuffle else "none",
        "shuffle_block_size": dataset.shuffle_block_size, "replication": dataset.replication or 1,
    }
