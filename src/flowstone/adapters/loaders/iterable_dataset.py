"""An IterableDataset of Hugging Face's datasets, alone or divided by `split_dataset_by_node`.

Its state says which of this rank's shards is being read, and how many examples were read from that shard. Shards that
were not read yet can be moved to other ranks. A rank can get at most one shard that was partly read, as a state has
only one position. If each rank takes every N-th example instead, all ranks read the same stream, and are at the same
position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from flowstone.adapters.loaders.state_checks import (
    OTHER_ORDER,
    checked_state,
    refuse_changes,
    refuse_disagreement,
    require_known_version,
)
from flowstone.errors import StateError, UnsupportedStateError

KIND: Final = "datasets.IterableDataset"
VERSIONS: Final = ("5.2.0",)
CLASS: Final = "datasets.iterable_dataset.IterableDataset"
_COUNTS: Final = ("SkipExamplesIterable", "TakeExamplesIterable", "RepeatExamplesIterable")


class IterableDatasetState:
    """Saves and restores an IterableDataset. A rank's state is a dict:

        kind, version  KIND, and the version of datasets
        made_of        which shards there are, and how they are divided among ranks; see `_properties`
        epoch          the dataset's epoch
        dataset        the dataset's own state
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._version = require_known_version("datasets", VERSIONS)
        refuse_inexact(dataset)

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND, "version": self._version, "made_of": _properties(self._dataset), "epoch": self._dataset.epoch,
            "dataset": self._dataset.state_dict(),
        }

    def load_state_dict(self, state: object) -> None:
        """Restore a state. Raises StateError if the dataset cannot continue exactly from it."""
        saved = checked_state(state, KIND, VERSIONS)
        refuse_changes(saved["made_of"], _properties(self._dataset), saved["made_of"], OTHER_ORDER)
        self._dataset.set_epoch(saved["epoch"])  # the dataset ignores a state of another epoch
        self._dataset.load_state_dict(saved["dataset"])
        # Until the next iteration, state_dict() would otherwise return the position from before the load.
        self._dataset._prepare_ex_iterable_for_iteration()

    def redistribute(self, states: list[object], rank: int, ranks: int) -> dict[str, Any]:
        """The state with which this dataset continues after all examples that were read by the ranks that saved.

        raises  StateError  the remaining examples cannot be divided among these ranks
        """
        saved = [checked_state(state, KIND, VERSIONS) for state in states]
        was, now = _as_divided(saved[0]["made_of"], len(states)), _properties(self._dataset)
        refuse_disagreement(
            [own["made_of"] | {"epoch": own["epoch"]} for own in saved], ("pipeline", "num_shards", "ranks", "epoch")
        )
        refuse_changes(was, now, ("pipeline", "num_shards"), OTHER_ORDER)
        by_rank = _by_rank(saved)
        dealt = _as_divided(now, ranks)
        if was["ranks"] is None or dealt["ranks"] is None or by_rank.keys() != {*range(was["ranks"])}:
            raise _indivisible(
                "the dataset was not divided among the ranks by split_dataset_by_node",
                "divide it with split_dataset_by_node",
            )
        if dealt["ranks"] == was["ranks"] and dealt["by_shards"] == was["by_shards"]:
            return {**saved[0], "made_of": now, "dataset": by_rank[dealt["rank"]]}
        _refuse_buffering(self._dataset)
        places = [by_rank[number] for number in range(was["ranks"])]
        if any(place["epoch"] != saved[0]["epoch"] for place in places):  # some ranks have not begun the epoch yet
            places = []
        fresh = _epoch_start(self._dataset, saved[0]["epoch"])
        if was["by_shards"] and dealt["by_shards"]:
            place_found = _position_in_shards(places, fresh, was["num_shards"], dealt)
        elif all(layout["ranks"] == 1 or not layout["by_shards"] for layout in (was, dealt)):
            place_found = _position_in_stream(places, fresh)
        else:
            raise _indivisible(
                f"its {was['num_shards']} shards can be divided evenly only among "
                f"{'the ranks that saved' if was['by_shards'] else 'the ranks of this job'}",
                "write the dataset into shards whose number is a multiple of both the old and the new number of ranks",
            )
        return {**saved[0], "made_of": now, "dataset": place_found}


def _by_rank(saved: list[Any]) -> dict[int, Any]:
    """The states by the rank that the dataset's division uses (the dataset rank). Ranks of the job that share a dataset
    rank (model parallelism) must have the same state.
    """
    by_rank: dict[int, Any] = {}
    for state in saved:
        rank = state["made_of"]["rank"] or 0
        if by_rank.setdefault(rank, state["dataset"]) != state["dataset"]:
            raise _indivisible(
                f"ranks that share the examples of dataset rank {rank} had read different numbers of them",
                "before a save, read the same number of examples on each of these ranks",
            )
    return by_rank


def _refuse_buffering(dataset: Any) -> None:
    """Raise StateError if the dataset's pipeline has stages with buffers or counts, which belong to one rank."""
    for stage in _pipeline(dataset._ex_iterable):
        if getattr(stage, "batched", False):
            raise _indivisible(
                "a batched map() or filter() buffers examples that were not yielded yet", "leave batched=True out",
            )
        if type(stage).__name__ in _COUNTS or getattr(stage, "with_indices", False):
            raise _indivisible(
                "skip(), take(), repeat() and with_indices=True count the examples of a rank", "leave them out",
            )


def _position_in_shards(places: list[Any], fresh: Any, num_shards: int, dealt: dict[str, Any]) -> Any:
    """The position of a rank that reads complete shards. Rank r of N has the shards r, r + N, r + 2N, ..."""
    behind: set[int] = set()
    begun: dict[int, Any] = {}
    for rank, place in enumerate(places):
        own = range(rank, num_shards, len(places))
        index = _reading_position(place)["shard_idx"]
        behind |= {*own[:index]}
        if index < len(own) and _reading_position(place)["shard_example_idx"]:
            begun[own[index]] = place
    mine = range(dealt["rank"], num_shards, dealt["ranks"])
    left = [shard for shard in mine if shard not in behind]
    first = mine.index(left[0]) if left else len(mine)
    if {*mine[first:]} & behind or any(shard in begun for shard in left[1:]):
        raise _indivisible(
            f"a rank would get several partly read shards (of {sorted(begun)}), but its state can hold only one",
            "load a step at the end of an epoch, or load on a multiple of the number of ranks that saved",
        )
    if not left or left[0] not in begun:
        return _with_position(fresh, {"shard_idx": first, "shard_example_idx": 0})
    place = begun[left[0]]
    if len({leaf["shard_idx"] for leaf in _positions(place)}) > 1:
        raise _indivisible("a rank still buffered examples of the shard before its current one", "load another step")
    return _with_position(place, {"shard_idx": first})


def _position_in_stream(places: list[Any], fresh: Any) -> Any:
    """The position of ranks of which each takes every N-th example of the same stream."""
    if not places:
        return fresh
    leaf = _reading_position(places[0])
    if any(_reading_position(place) != leaf for place in places):
        raise _indivisible("the ranks that saved had read different numbers of examples", "load another step")
    if any(len([*_positions(place)]) > 1 for place in [*places, fresh]) or any(map(_is_stepped, places)):
        raise _indivisible(
            "the dataset reads tables ahead, and each rank takes its examples from all of them",
            "write the dataset into shards whose number is a multiple of both the old and the new number of ranks",
        )
    return _with_position(fresh, leaf)


def _indivisible(reason: str, next: str) -> StateError:
    return StateError(
        "this dataset cannot be divided among another number of ranks",
        found=reason, next=f"{next}; or load with as many ranks as saved",
    )


def _positions(state: Any) -> Iterator[dict[str, Any]]:
    """All positions in shards that a state has: the position from which to read next, and the positions from before the
    buffered examples were read.
    """
    if isinstance(state, dict):
        if "shard_idx" in state:
            yield state
        for value in state.values():
            yield from _positions(value)
    elif isinstance(state, list):
        for value in state:
            yield from _positions(value)


def _reading_position(state: dict[str, Any]) -> dict[str, Any]:
    """The position (shard and example) from which the dataset reads next."""
    inner = state["examples_iterable"]
    while isinstance(inner, dict) and "examples_iterable" in inner:
        inner = inner["examples_iterable"]
    if not isinstance(inner, dict) or "shard_idx" not in inner:
        raise _indivisible(
            "the dataset alternates between shards, as after shuffle(), or between several datasets",
            "use one dataset without shuffle(), and shuffle the examples when you write the shards",
        )
    return inner


def _with_position(state: Any, place: dict[str, Any]) -> Any:
    """A copy of a state with all its positions set to `place`."""
    if not isinstance(state, dict):
        return state
    return {key: _with_position(value, place) for key, value in state.items()} | (place if "shard_idx" in state else {})


def _is_stepped(state: Any) -> bool:
    return isinstance(state, dict) and (bool(state.get("stepped")) or any(map(_is_stepped, state.values())))


def _epoch_start(dataset: Any, epoch: int) -> Any:
    """The state at the beginning of an epoch."""
    dataset.set_epoch(epoch)
    dataset.load_state_dict(None)
    dataset._prepare_ex_iterable_for_iteration()
    return dataset.state_dict()


def _properties(dataset: Any) -> dict[str, Any]:
    """The properties of a dataset that determine the order of examples, and which rank reads each."""
    divided, shards = dataset._distributed, dataset._ex_iterable.num_shards
    by_shards = divided is not None and (
        divided.strategy == "shards" or (divided.strategy == "auto" and shards % divided.world_size == 0)
    )
    return {
        "pipeline": ", ".join(type(stage).__name__ for stage in _pipeline(dataset._ex_iterable)), "num_shards": shards,
        "rank": divided.rank if divided else None, "ranks": divided.world_size if divided else None,
        "by_shards": by_shards,
    }


def _as_divided(made_of: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The same properties. In a job of one rank, a dataset that is not divided counts as divided among one rank."""
    is_alone = made_of["ranks"] is None and ranks == 1
    return made_of | {"rank": 0, "ranks": 1, "by_shards": True} if is_alone else made_of


def _pipeline(iterable: Any) -> Iterator[Any]:
    yield iterable
    inner = [iterable.ex_iterable] if hasattr(iterable, "ex_iterable") else getattr(iterable, "ex_iterables", ())
    for inner_iterable in inner:
        yield from _pipeline(inner_iterable)


def refuse_inexact(dataset: Any) -> None:
    """Raise UnsupportedStateError for pipelines that `datasets` cannot restore exactly, according to its documentation.
    """
    formatting = dataset._formatting
    for stage in _pipeline(dataset._ex_iterable):
        name = type(stage).__name__
        if name == "BufferShuffledExamplesIterable" and (stage.buffer_size > 1 or formatting is not None):
            raise UnsupportedStateError(
                "a dataset with a shuffle buffer cannot be resumed: the buffered examples are not saved",
                next="use shuffle(seed=..., buffer_size=1), which buffers no examples, and remove with_format(); "
                "or shuffle the examples when you write the shards",
            )
        if getattr(stage, "batched", False) and formatting is not None and formatting.is_table:
            raise UnsupportedStateError(
                "a dataset with a batched map() and a table format cannot be resumed: a batch could be lost",
                next="remove with_format(), or remove batched=True from map()",
            )
