"""An IterableDataset of Hugging Face's datasets, by itself or divided by `split_dataset_by_node`.

Its state says which shard it reads, of those of this rank, and how many examples of that are behind it. Whole shards
can be given to other ranks; a shard that was begun can, too, where a rank gets no second one of them, for a state has
room for one. Where each rank takes one example of N instead, all ranks read the same stream, and are equally far in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from flowstone.adapters.loaders.saved import OTHER_ORDER, refuse_changes, refuse_disagreement, require_known, state_of
from flowstone.errors import StateError, UnsupportedStateError

KIND: Final = "datasets.IterableDataset"
VERSIONS: Final = ("5.2.0",)
CLASS: Final = "datasets.iterable_dataset.IterableDataset"
_COUNTS: Final = ("SkipExamplesIterable", "TakeExamplesIterable", "RepeatExamplesIterable")


class IterableDatasetState:
    """What a checkpoint holds of an IterableDataset. The state of a rank is a dict:

        kind, version  KIND, of datasets
        made_of        shards, and how they are divided; see `_made_of`
        epoch          of the dataset
        dataset        its own state
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._version = require_known("datasets", VERSIONS)
        refuse_inexact(dataset)

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND, "version": self._version, "made_of": _made_of(self._dataset), "epoch": self._dataset.epoch,
            "dataset": self._dataset.state_dict(),
        }

    def load_state_dict(self, state: object) -> None:
        """Raises StateError if the dataset cannot go on exactly where the saved one was."""
        saved = state_of(state, KIND, VERSIONS)
        refuse_changes(saved["made_of"], _made_of(self._dataset), saved["made_of"], OTHER_ORDER)
        self._dataset.set_epoch(saved["epoch"])  # a state of another epoch is ignored
        self._dataset.load_state_dict(saved["dataset"])
        # Until the next iteration it would still save the place where it was before the load.
        self._dataset._prepare_ex_iterable_for_iteration()

    def redistribute(self, states: list[object], rank: int, ranks: int) -> dict[str, Any]:
        """The state with which this dataset goes on behind all that the ranks that saved have read together.

        raises  StateError  it cannot be divided among these ranks
        """
        saved = [state_of(one, KIND, VERSIONS) for one in states]
        was, now = _whole(saved[0]["made_of"], len(states)), _made_of(self._dataset)
        refuse_disagreement(
            [one["made_of"] | {"epoch": one["epoch"]} for one in saved], ("pipeline", "num_shards", "ranks", "epoch")
        )
        refuse_changes(was, now, ("pipeline", "num_shards"), OTHER_ORDER)
        by_rank = _by_rank(saved)
        dealt = _whole(now, ranks)
        if was["ranks"] is None or dealt["ranks"] is None or by_rank.keys() != {*range(was["ranks"])}:
            raise _indivisible(
                "split_dataset_by_node has not divided it among the ranks", "divide it by split_dataset_by_node"
            )
        if dealt["ranks"] == was["ranks"] and dealt["by_shards"] == was["by_shards"]:
            return {**saved[0], "made_of": now, "dataset": by_rank[dealt["rank"]]}
        _refuse_uncertain(self._dataset)
        places = [by_rank[number] for number in range(was["ranks"])]
        if any(place["epoch"] != saved[0]["epoch"] for place in places):  # the epoch has not begun
            places = []
        fresh = _fresh(self._dataset, saved[0]["epoch"])
        if was["by_shards"] and dealt["by_shards"]:
            found = _of_shards(places, fresh, was["num_shards"], dealt)
        elif all(one["ranks"] == 1 or not one["by_shards"] for one in (was, dealt)):
            found = _of_stream(places, fresh)
        else:
            raise _indivisible(
                f"its {was['num_shards']} shards are whole {'at the save' if was['by_shards'] else 'now'} alone: "
                "they divide by one number of ranks and not by the other", "write as many shards as both divide",
            )
        return {**saved[0], "made_of": now, "dataset": found}


def _by_rank(saved: list[Any]) -> dict[int, Any]:
    """The dataset's state by the rank that it is for. Ranks of one model share one, and have read alike."""
    found: dict[int, Any] = {}
    for one in saved:
        rank = one["made_of"]["rank"] or 0
        if found.setdefault(rank, one["dataset"]) != one["dataset"]:
            raise _indivisible(
                f"ranks that share the examples of rank {rank} had read different numbers of them",
                "read as many on each of them before a save",
            )
    return found


def _refuse_uncertain(dataset: Any) -> None:
    """Refuse steps whose state is no place alone: what they hold or have counted is no other rank's."""
    for one in _pipeline(dataset._ex_iterable):
        if getattr(one, "batched", False):
            raise _indivisible(
                "a batched map() or filter() holds examples that no rank has seen", "leave batched=True out",
            )
        if type(one).__name__ in _COUNTS or getattr(one, "with_indices", False):
            raise _indivisible(
                "skip(), take(), repeat() and with_indices=True count the examples of a rank", "leave them out",
            )


def _of_shards(places: list[Any], fresh: Any, num_shards: int, dealt: dict[str, Any]) -> Any:
    """The place of a rank that goes through whole shards: rank r of N has the shards r, r + N, r + 2N, ..."""
    behind: set[int] = set()
    begun: dict[int, Any] = {}
    for rank, place in enumerate(places):
        own = range(rank, num_shards, len(places))
        index = _leaf(place)["shard_idx"]
        behind |= {*own[:index]}
        if index < len(own) and _leaf(place)["shard_example_idx"]:
            begun[own[index]] = place
    mine = range(dealt["rank"], num_shards, dealt["ranks"])
    left = [shard for shard in mine if shard not in behind]
    first = mine.index(left[0]) if left else len(mine)
    if {*mine[first:]} & behind or any(shard in begun for shard in left[1:]):
        raise _indivisible(
            f"the ranks were in the middle of shards (begun: {sorted(begun)}), and a rank's state has room for one",
            "load a step at the end of an epoch, or on more ranks than saved: so many times as many, say",
        )
    if not left or left[0] not in begun:
        return _at(fresh, {"shard_idx": first, "shard_example_idx": 0})
    place = begun[left[0]]
    if len({leaf["shard_idx"] for leaf in _leaves(place)}) > 1:
        raise _indivisible("a rank had begun a shard, and still held examples of the one before", "load another step")
    return _at(place, {"shard_idx": first})


def _of_stream(places: list[Any], fresh: Any) -> Any:
    """The place of ranks that each take one example of N from the same stream."""
    if not places:
        return fresh
    leaf = _leaf(places[0])
    if any(_leaf(place) != leaf for place in places):
        raise _indivisible("the ranks that saved had read different numbers of examples", "load another step")
    if any(len([*_leaves(place)]) > 1 for place in [*places, fresh]) or any(map(_is_stepped, places)):
        raise _indivisible(
            "it reads tables, of which a part is read ahead, and each rank takes its examples of all of them",
            "write so many shards that the numbers of ranks divide them",
        )
    return _at(fresh, leaf)


def _indivisible(found: str, next: str) -> StateError:
    return StateError(
        "this dataset cannot be divided among another number of ranks", found=found,
        next=f"{next}; or load on the number of ranks that saved",
    )


def _leaves(state: Any) -> Iterator[dict[str, Any]]:
    """The places in shards in a state: of what it reads, and of before what it holds in memory."""
    if isinstance(state, dict):
        if "shard_idx" in state:
            yield state
        for value in state.values():
            yield from _leaves(value)
    elif isinstance(state, list):
        for value in state:
            yield from _leaves(value)


def _leaf(state: dict[str, Any]) -> dict[str, Any]:
    """The place of what is read."""
    inner = state["examples_iterable"]
    while isinstance(inner, dict) and "examples_iterable" in inner:
        inner = inner["examples_iterable"]
    if not isinstance(inner, dict) or "shard_idx" not in inner:
        raise _indivisible(
            "it goes through several shards in turn, as shuffle() makes it, or through several datasets",
            "leave that out, and shuffle the examples when you write the shards",
        )
    return inner


def _at(state: Any, place: dict[str, Any]) -> Any:
    """A copy of a state, with each place in shards changed."""
    if not isinstance(state, dict):
        return state
    return {key: _at(value, place) for key, value in state.items()} | (place if "shard_idx" in state else {})


def _is_stepped(state: Any) -> bool:
    return isinstance(state, dict) and (bool(state.get("stepped")) or any(map(_is_stepped, state.values())))


def _fresh(dataset: Any, epoch: int) -> Any:
    """The state of the beginning of an epoch."""
    dataset.set_epoch(epoch)
    dataset.load_state_dict(None)
    dataset._prepare_ex_iterable_for_iteration()
    return dataset.state_dict()


def _made_of(dataset: Any) -> dict[str, Any]:
    """What decides on the order of examples, and on the rank that each is for."""
    divided, shards = dataset._distributed, dataset._ex_iterable.num_shards
    by_shards = divided is not None and (
        divided.strategy == "shards" or (divided.strategy == "auto" and shards % divided.world_size == 0)
    )
    return {
        "pipeline": ", ".join(type(one).__name__ for one in _pipeline(dataset._ex_iterable)), "num_shards": shards,
        "rank": divided.rank if divided else None, "ranks": divided.world_size if divided else None,
        "by_shards": by_shards,
    }


def _whole(made_of: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The same, where a job of one rank reads what is not divided."""
    is_alone = made_of["ranks"] is None and ranks == 1
    return made_of | {"rank": 0, "ranks": 1, "by_shards": True} if is_alone else made_of


def _pipeline(iterable: Any) -> Iterator[Any]:
    yield iterable
    inner = [iterable.ex_iterable] if hasattr(iterable, "ex_iterable") else getattr(iterable, "ex_iterables", ())
    for one in inner:
        yield from _pipeline(one)


def refuse_inexact(dataset: Any) -> None:
    """Refuse what datasets saves and does not restore, as its documentation says."""
    formatting = dataset._formatting
    for one in _pipeline(dataset._ex_iterable):
        name = type(one).__name__
        if name == "BufferShuffledExamplesIterable" and (one.buffer_size > 1 or formatting is not None):
            raise UnsupportedStateError(
                "a dataset with a shuffle buffer cannot be resumed: the examples in the buffer are in no state",
                next="shuffle(seed=..., buffer_size=1) holds no examples, and is resumed where the dataset has no "
                "with_format(); or shuffle the examples when you write the shards",
            )
        if getattr(one, "batched", False) and formatting is not None and formatting.is_table:
            raise UnsupportedStateError(
                "a dataset with a batched map() and a format of tables cannot be resumed: a batch may be left out",
                next="leave with_format() out, or batched=True",
            )
