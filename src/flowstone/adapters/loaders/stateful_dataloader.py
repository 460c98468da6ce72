"""torchdata's StatefulDataLoader: its own state where nothing has changed, and otherwise the number of its samples.

torchdata's state is that of one loader: of so many workers, on this rank of so many. What does not depend on that is
how many samples have come out of the sampler. Where their order is a function of seed and epoch, as with the samplers
that are known here, other workers, other batches and other ranks go on from that number.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from flowstone.adapters.loaders import iterable_dataset
from flowstone.adapters.loaders.positions import batches_in, counts_on, samples_of_a_rank, taken_together
from flowstone.adapters.loaders.saved import OTHER_ORDER, refuse_changes, refuse_disagreement, require_known, state_of
from flowstone.adapters.loaders.torchdata_state import begun_at, consistent, has_dataset_state, samples_yielded
from flowstone.errors import StateError, UnsupportedStateError

KIND: Final = "torchdata.StatefulDataLoader"
VERSIONS: Final = ("0.11.0",)
_TORCH: Final = "torch.utils.data"
_TORCHDATA: Final = "torchdata.stateful_dataloader.sampler"
_STATEFUL_DISTRIBUTED: Final = f"{_TORCHDATA}.StatefulDistributedSampler"
_DISTRIBUTED: Final = (f"{_TORCH}.distributed.DistributedSampler", _STATEFUL_DISTRIBUTED)
_RANDOM: Final = f"{_TORCHDATA}.RandomSampler"
_TRACEABLE: Final = (*_DISTRIBUTED, _RANDOM, f"{_TORCH}.sampler.SequentialSampler")
_FORGETFUL: Final = tuple(f"{_TORCH}.sampler.{name}RandomSampler" for name in ("", "Subset", "Weighted"))
_ORDER: Final = ("dataset", "dataset_length", "sampler", "seed", "shuffle", "sampler_drop_last")
_LAYOUT: Final = ("num_workers", "batch_size", "drop_last", "snapshot_every_n_steps")


class StatefulDataLoaderState:
    """What a checkpoint holds of a StatefulDataLoader. A load begins the loader's next iterator, with its workers.

    The state of a rank is a dict:

        kind, version  KIND, of torchdata
        made_of        what the loader is made of; see `_made_of`
        epoch          of the sampler and of the dataset, where they have set_epoch()
        samples        how many this rank has yielded in this epoch; None if torchdata's state alone knows the place
        finished       the epoch has ended: the next iteration begins another
        loader         torchdata's state; None before the first epoch, and where it was redistributed
        generators     of which the next epochs draw
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._version = require_known("torchdata", VERSIONS)
        _refuse_inexact(loader)

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader
        # Before the first iteration torchdata would begin one, which starts workers and draws from torch's generator.
        begun = loader._iterator is not None or loader.next_iter_state is not None or _is_stateful(loader.dataset)
        state = consistent(loader.state_dict()) if begun else None
        is_traceable = _is_traceable(loader) and not (state and has_dataset_state(state))
        return {
            "kind": KIND, "version": self._version, "made_of": _made_of(loader), "epoch": _epochs(loader),
            "samples": (samples_yielded(loader, state) if state else 0) if is_traceable else None,
            "finished": bool(state and state["_iterator_finished"]), "loader": state,
            "generators": {name: one.get_state() for name, one in _generators(loader).items()},
        }

    def load_state_dict(self, state: object) -> None:
        """Raises StateError if the loader cannot go on exactly where the saved one was."""
        loader, saved, now = self._loader, state_of(state, KIND, VERSIONS), _made_of(self._loader)
        refuse_changes(saved["made_of"], now, _ORDER, OTHER_ORDER)
        refuse_changes(
            saved["made_of"], now, ("rank", "ranks"),
            "the sampler divides the data among other ranks, in a job of as many as before: divide it as at the save",
        )
        is_same = all(saved["made_of"][name] == now[name] for name in _LAYOUT)
        if saved["samples"] is None:
            refuse_changes(
                saved["made_of"], now, _LAYOUT, "keep these as they were at the save: the dataset or the sampler has a "
                "state of its own, which is of the workers and the batches of then",
            )
        for name, epoch in saved["epoch"].items():
            _with_epochs(loader)[name].set_epoch(epoch)
        if saved["loader"] is not None and is_same:
            _begin(loader, saved["loader"])
        elif saved["samples"] is None or saved["finished"] or (saved["loader"] is None and not saved["samples"]):
            loader.load_state_dict({})  # the next epoch, from its first sample
        else:
            _begin(loader, begun_at(loader, saved["samples"], saved["loader"]))
        if saved["finished"] and now["sampler"] == _STATEFUL_DISTRIBUTED:
            # It still holds the number of samples that it is to skip, and would skip them in the next epoch.
            _sampler(loader).load_state_dict({"yielded": 0})
        for name, generator in _generators(loader).items():
            if name in saved["generators"]:
                generator.set_state(saved["generators"][name])

    def redistribute(self, states: list[object], rank: int, ranks: int) -> dict[str, Any]:
        """The state with which this loader goes on behind all that the loaders of other ranks have yielded together.

        raises  StateError  their data cannot be divided among these ranks
        """
        now = _made_of(self._loader)
        saved = [state_of(one, KIND, VERSIONS) for one in states]
        was = saved[0]["made_of"]
        _refuse_undivided(was, now)
        refuse_disagreement(
            [one["made_of"] | {"epoch": one["epoch"]} for one in saved],
            (*_ORDER, "ranks", "batch_size", "drop_last", "epoch"),
        )
        by_rank = _by_rank(saved)
        if now["ranks"] == was["ranks"]:  # the others are of tensor parallelism, say
            return by_rank[now["rank"]]
        refuse_changes(was, now, _ORDER, OTHER_ORDER)
        return by_rank[0] | {
            "made_of": now, "loader": None, "generators": {}, "finished": all(one["finished"] for one in saved),
            "samples": _redistributed(was, now, [by_rank[number]["samples"] for number in range(was["ranks"])]),
        }


def _redistributed(was: dict[str, Any], now: dict[str, Any], counts: list[int]) -> int:
    """How many samples of this epoch are behind this rank, if so many were behind each of the ranks that saved."""

    def left(made_of: dict[str, Any], counts: list[int]) -> tuple[list[int], list[int]]:
        """Of each rank the samples that its sampler has, and the batches that are left to its loader."""
        whole = samples_of_a_rank(made_of["dataset_length"], made_of["ranks"], made_of["sampler_drop_last"])
        counts = [min(whole, count) for count in counts]
        return counts, [batches_in(whole - count, made_of["batch_size"], made_of["drop_last"]) for count in counts]

    if not any(left(was, counts)[1]):  # the epoch was over, but for what is dropped
        return samples_of_a_rank(now["dataset_length"], now["ranks"], now["sampler_drop_last"])
    total = taken_together(counts)
    if total is None:
        raise StateError(
            "the ranks that saved had gone through different numbers of samples, so what is left has gaps",
            found=repr(counts), next="load on the number of ranks that saved, or a step at which all ranks had gone "
            "through the same number of batches",
        )
    counts, batches = left(now, counts_on(total, now["ranks"]))
    if len(set(batches)) > 1:
        raise StateError(
            f"{total} samples of this epoch are trained on, and what is left does not divide among {now['ranks']} "
            "ranks: some of them would have one batch more than others, and wait for them for ever",
            found=f"batches left: {min(batches)} to {max(batches)}",
            next=f"load a step whose samples divide by {now['ranks']}, such as the end of an epoch; or load on "
            "a number of ranks that divides them; or give the loader drop_last=True, or another batch_size",
        )
    rank: int = now["rank"]
    return counts[rank]


def _by_rank(saved: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The states by rank of the sampler: several ranks of a job may go through the same data."""
    by_rank: dict[int, dict[str, Any]] = {}
    for one in saved:
        peer = by_rank.setdefault(one["made_of"]["rank"], one)
        if (peer["samples"], peer["finished"]) != (one["samples"], one["finished"]):
            raise StateError(
                f"ranks that saved shared the sampler's rank {one['made_of']['rank']}, and differ in their place",
                found=f"{peer['samples']} and {one['samples']} samples", next="load on the number of ranks that saved",
            )
    missing = sorted({*range(saved[0]["made_of"]["ranks"])} - by_rank.keys())
    if missing:
        raise StateError(
            "the states of some of the sampler's ranks are missing", found=f"none of {missing}",
            next="load on the number of ranks that saved; and let every rank save its loader",
        )
    return by_rank


def _refuse_undivided(was: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a redistribution of data that no known sampler divides."""
    for made_of, when in ((was, "at the save"), (now, "now")):
        if made_of["ranks"] is None:
            what = "iterable dataset" if made_of["dataset"] == "iterable" else made_of["sampler"]
            raise StateError(
                "the data of this loader cannot be divided among another number of ranks",
                found=f"{when}, its {what} does not say which samples are of which rank",
                next="load on the number of ranks that saved; where that is to change, use a map-style dataset with "
                "sampler=StatefulDistributedSampler(dataset), and batch_size=",
            )
        if made_of["dataset_state"]:
            raise StateError(
                "the data of this loader cannot be divided among another number of ranks",
                found=f"{when}, its dataset has a state of its own, which Flowstone cannot divide",
                next="load on the number of ranks that saved; or remove state_dict() from the dataset",
            )


def _made_of(loader: Any) -> dict[str, Any]:
    """What decides on the order of samples, on the rank that each is for, and on what torchdata's state looks like."""
    sampler, is_map = _sampler(loader), loader._dataset_kind == 0
    is_distributed = _is_traceable(loader) and _name(sampler) in _DISTRIBUTED
    return {
        "dataset": "map" if is_map else "iterable", "dataset_state": _is_stateful(loader.dataset),
        "dataset_length": len(loader.dataset) if is_map and hasattr(loader.dataset, "__len__") else None,
        "sampler": _name(sampler), "seed": sampler.seed if is_distributed else None,
        "shuffle": sampler.shuffle if is_distributed else None,
        "sampler_drop_last": sampler.drop_last if is_distributed else None,
        "rank": sampler.rank if is_distributed else None, "ranks": sampler.num_replicas if is_distributed else None,
        "num_workers": loader.num_workers, "batch_size": loader.batch_size, "drop_last": loader.drop_last,
        "snapshot_every_n_steps": loader.snapshot_every_n_steps if loader.num_workers else None,
    }


def _refuse_inexact(loader: Any) -> None:
    """Refuse what torchdata saves and does not restore."""
    sampler = _sampler(loader)
    if _name(sampler) in _FORGETFUL:
        raise UnsupportedStateError(
            f"a loader with torch's {type(sampler).__name__} cannot be resumed: its order is in no state",
            next="give shuffle=True to the StatefulDataLoader, or sampler=StatefulDistributedSampler(dataset), or a "
            "sampler with state_dict()",
        )
    if _name(loader.dataset) == iterable_dataset.CLASS:
        iterable_dataset.refuse_inexact(loader.dataset)
    if loader.num_workers and not loader.in_order:
        raise UnsupportedStateError(
            "a loader with in_order=False cannot be resumed: torchdata does not know which batches it has yielded",
            next="leave in_order out",
        )


def _name(one: object) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _sampler(loader: Any) -> Any:
    """What decides on the order: of a batch_sampler that the user gave its sampler, if it has one."""
    batch_sampler = loader.batch_sampler
    return loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", batch_sampler)


def _is_traceable(loader: Any) -> bool:
    """Whether the number of samples alone is a place, from which any workers and batches can go on."""
    own = _name(loader.batch_sampler) == f"{_TORCHDATA}.BatchSampler" and loader.batch_size is not None
    return own and _name(_sampler(loader)) in _TRACEABLE


def _is_stateful(dataset: object) -> bool:
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def _with_epochs(loader: Any) -> dict[str, Any]:
    parts = {"sampler": _sampler(loader), "dataset": loader.dataset}
    return {
        key: one for key, one in parts.items() if callable(getattr(one, "set_epoch", None)) and hasattr(one, "epoch")
    }


def _epochs(loader: Any) -> dict[str, int]:
    return {key: int(one.epoch) for key, one in _with_epochs(loader).items()}


def _generators(loader: Any) -> dict[str, torch.Generator]:
    is_random = _name(loader.sampler) == _RANDOM
    found = {"loader": loader.generator, "sampler": loader.sampler.generator if is_random else None}
    return {key: one for key, one in found.items() if isinstance(one, torch.Generator)}


def _begin(loader: Any, state: dict[str, Any]) -> None:
    """Begin the iterator now: what does not fit is found by the load, and what it draws is drawn before it restores
    the random number generators.
    """
    loader.load_state_dict(state)
    loader.state_dict()
