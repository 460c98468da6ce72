"""torchdata's StatefulDataLoader. It is restored from its own state if nothing has changed, and otherwise from its
number of yielded samples.

torchdata's state depends on the number of workers and ranks. The number of samples that the sampler has yielded does
not. If the order of samples is a function of seed and epoch, as with the supported samplers, a
loader can continue from that number with any number of workers and ranks, and any batch size.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from flowstone.adapters.loaders import iterable_dataset
from flowstone.adapters.loaders.positions import batches_in, common_prefix, counts_per_rank, samples_per_rank
from flowstone.adapters.loaders.state_checks import (
    OTHER_ORDER,
    checked_state,
    refuse_changes,
    refuse_disagreement,
    require_known_version,
)
from flowstone.adapters.loaders.torchdata_state import corrected_state, has_dataset_state, samples_yielded, state_after
from flowstone.errors import StateError, UnsupportedStateError

KIND: Final = "torchdata.StatefulDataLoader"
VERSIONS: Final = ("0.11.0",)
_TORCH: Final = "torch.utils.data"
_TORCHDATA: Final = "torchdata.stateful_dataloader.sampler"
_STATEFUL_DISTRIBUTED: Final = f"{_TORCHDATA}.StatefulDistributedSampler"
_DISTRIBUTED: Final = (f"{_TORCH}.distributed.DistributedSampler", _STATEFUL_DISTRIBUTED)
_RANDOM: Final = f"{_TORCHDATA}.RandomSampler"
_COUNTABLE: Final = (*_DISTRIBUTED, _RANDOM, f"{_TORCH}.sampler.SequentialSampler")
_UNSAVED_ORDER: Final = tuple(f"{_TORCH}.sampler.{name}RandomSampler" for name in ("", "Subset", "Weighted"))
_ORDER: Final = ("dataset", "dataset_length", "sampler", "seed", "shuffle", "sampler_drop_last")
_LAYOUT: Final = ("num_workers", "batch_size", "drop_last", "snapshot_every_n_steps")


class StatefulDataLoaderState:
    """Saves and restores a StatefulDataLoader. A load starts the loader's next iterator, with its workers.

    A rank's state is a dict:

        kind, version  KIND, and the version of torchdata
        made_of        properties that must not change, such as the sampler and its seed; see `_properties`
        epoch          epochs of sampler and dataset, if they have set_epoch()
        samples        how many samples this rank has yielded in this epoch; None if only torchdata's state has the
                       position
        finished       whether the epoch has ended, so that the next iteration begins a new one
        loader         torchdata's state; None before the first epoch, and after a redistribution
        generators     states of the random generators that the next epochs use
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._version = require_known_version("torchdata", VERSIONS)
        _refuse_inexact(loader)

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader
        # Before the first iteration, state_dict() would start one, with workers, and draw from torch's generator.
        begun = loader._iterator is not None or loader.next_iter_state is not None or _is_stateful(loader.dataset)
        state = corrected_state(loader.state_dict()) if begun else None
        is_traceable = _is_countable(loader) and not (state and has_dataset_state(state))
        return {
            "kind": KIND, "version": self._version, "made_of": _properties(loader), "epoch": _epochs(loader),
            "samples": (samples_yielded(loader, state) if state else 0) if is_traceable else None,
            "finished": bool(state and state["_iterator_finished"]), "loader": state,
            "generators": {name: generator.get_state() for name, generator in _generators(loader).items()},
        }

    def load_state_dict(self, state: object) -> None:
        """Restore a state. Raises StateError if the loader cannot continue exactly from it."""
        loader, saved, now = self._loader, checked_state(state, KIND, VERSIONS), _properties(self._loader)
        refuse_changes(saved["made_of"], now, _ORDER, OTHER_ORDER)
        refuse_changes(
            saved["made_of"], now, ("rank", "ranks"),
            "the sampler divides the data differently, with the same number of ranks: divide the data as at the save",
        )
        is_same = all(saved["made_of"][name] == now[name] for name in _LAYOUT)
        if saved["samples"] is None:
            refuse_changes(
                saved["made_of"], now, _LAYOUT, "keep these as at the save: dataset or sampler has its own state, "
                "which depends on the workers and batches",
            )
        for name, epoch in saved["epoch"].items():
            _with_epochs(loader)[name].set_epoch(epoch)
        if saved["loader"] is not None and is_same:
            _start_iterator(loader, saved["loader"])
        elif saved["samples"] is None or saved["finished"] or (saved["loader"] is None and not saved["samples"]):
            loader.load_state_dict({})  # continues with the next epoch, at its first sample
        else:
            _start_iterator(loader, state_after(loader, saved["samples"], saved["loader"]))
        if saved["finished"] and now["sampler"] == _STATEFUL_DISTRIBUTED:
            # The sampler still has the number of samples to skip. Without this it would skip them again in the next
            # epoch.
            _sampler(loader).load_state_dict({"yielded": 0})
        for name, generator in _generators(loader).items():
            if name in saved["generators"]:
                generator.set_state(saved["generators"][name])

    def redistribute(self, states: list[object], rank: int, ranks: int) -> dict[str, Any]:
        """The state with which this loader continues after all samples that were yielded by the ranks that saved.

        raises  StateError  the remaining samples cannot be divided among these ranks
        """
        now = _properties(self._loader)
        saved = [checked_state(state, KIND, VERSIONS) for state in states]
        was = saved[0]["made_of"]
        _refuse_undivided(was, now)
        refuse_disagreement(
            [state["made_of"] | {"epoch": state["epoch"]} for state in saved],
            (*_ORDER, "ranks", "batch_size", "drop_last", "epoch"),
        )
        by_rank = _by_rank(saved)
        # only ranks that share data with others (such as tensor parallelism) were added or removed
        if now["ranks"] == was["ranks"]:
            return by_rank[now["rank"]]
        refuse_changes(was, now, _ORDER, OTHER_ORDER)
        return by_rank[0] | {
            "made_of": now, "loader": None, "generators": {}, "finished": all(state["finished"] for state in saved),
            "samples": _redistributed(was, now, [by_rank[number]["samples"] for number in range(was["ranks"])]),
        }


def _redistributed(was: dict[str, Any], now: dict[str, Any], counts: list[int]) -> int:
    """How many samples of the epoch this rank has consumed, computed from the positions of the ranks that saved."""

    def left(made_of: dict[str, Any], counts: list[int]) -> tuple[list[int], list[int]]:
        """For each rank: how many samples it has consumed, and how many batches are left. `made_of`: the properties of
        the loader (`_properties`).
        """
        whole = samples_per_rank(made_of["dataset_length"], made_of["ranks"], made_of["sampler_drop_last"])
        counts = [min(whole, count) for count in counts]
        return counts, [batches_in(whole - count, made_of["batch_size"], made_of["drop_last"]) for count in counts]

    if not any(left(was, counts)[1]):  # the epoch has ended, except for samples that are dropped
        return samples_per_rank(now["dataset_length"], now["ranks"], now["sampler_drop_last"])
    total = common_prefix(counts)
    if total is None:
        raise StateError(
            "the ranks that saved had read different numbers of samples, so the unread samples are not one contiguous "
            "range", found=repr(counts),
            next="load with as many ranks as saved, or load a step at which all ranks had read the same number of "
            "batches",
        )
    counts, batches = left(now, counts_per_rank(total, now["ranks"]))
    if len(set(batches)) > 1:
        raise StateError(
            f"the samples left in this epoch after the first {total} cannot be divided evenly among {now['ranks']} "
            "ranks: some ranks would get one batch more than others, and the job would hang",
            found=f"batches left: {min(batches)} to {max(batches)}",
            next=f"load a step at which the number of samples read is a multiple of {now['ranks']}, such as the end "
            "of an epoch; or load with another number of ranks; or use drop_last=True, or another batch_size",
        )
    rank: int = now["rank"]
    return counts[rank]


def _by_rank(saved: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The states by the sampler's rank. Several ranks of a job may read the same data, and so have the same rank in the
    sampler.
    """
    by_rank: dict[int, dict[str, Any]] = {}
    for state in saved:
        peer = by_rank.setdefault(state["made_of"]["rank"], state)
        if (peer["samples"], peer["finished"]) != (state["samples"], state["finished"]):
            raise StateError(
                f"ranks that shared the sampler rank {state['made_of']['rank']} had read different numbers of samples",
                found=f"{peer['samples']} and {state['samples']} samples", next="load with as many ranks as saved",
            )
    missing = sorted({*range(saved[0]["made_of"]["ranks"])} - by_rank.keys())
    if missing:
        raise StateError(
            f"the states of the sampler ranks {missing} are missing",
            next="load with as many ranks as saved, and let every rank save its loader",
        )
    return by_rank


def _refuse_undivided(was: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise StateError unless a known sampler divides the data among ranks."""
    for made_of, when in ((was, "at the save"), (now, "now")):
        if made_of["ranks"] is None:
            source = "iterable dataset" if made_of["dataset"] == "iterable" else made_of["sampler"]
            raise StateError(
                "the data of this loader cannot be divided among another number of ranks",
                found=f"{when}, the loader's {source} does not say which rank gets which samples",
                next="load with as many ranks as saved; to change the number, use a map-style dataset with "
                "sampler=StatefulDistributedSampler(dataset), and give batch_size=",
            )
        if made_of["dataset_state"]:
            raise StateError(
                "the data of this loader cannot be divided among another number of ranks",
                found=f"{when}, the loader's dataset has its own state, which Flowstone cannot divide",
                next="load with as many ranks as saved; or remove state_dict() from the dataset",
            )


def _properties(loader: Any) -> dict[str, Any]:
    """The properties of a loader that determine the order of samples, which rank reads each, and the form of
    torchdata's state.
    """
    sampler, is_map = _sampler(loader), loader._dataset_kind == 0
    is_distributed = _is_countable(loader) and _name(sampler) in _DISTRIBUTED
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
    """Raise UnsupportedStateError for loaders that torchdata cannot restore exactly."""
    sampler = _sampler(loader)
    if _name(sampler) in _UNSAVED_ORDER:
        raise UnsupportedStateError(
            f"a loader with torch's {type(sampler).__name__} cannot be resumed: its order is not saved",
            next="give shuffle=True to the StatefulDataLoader, or sampler=StatefulDistributedSampler(dataset), or a "
            "sampler with state_dict()",
        )
    if _name(loader.dataset) == iterable_dataset.CLASS:
        iterable_dataset.refuse_inexact(loader.dataset)
    if loader.num_workers and not loader.in_order:
        raise UnsupportedStateError(
            "a loader with in_order=False cannot be resumed: torchdata does not record which batches were yielded",
            next="leave in_order out",
        )


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _sampler(loader: Any) -> Any:
    """The sampler that determines the order of samples. If the user gave a batch_sampler that has a sampler, it is that
    sampler.
    """
    batch_sampler = loader.batch_sampler
    return loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", batch_sampler)


def _is_countable(loader: Any) -> bool:
    """Whether the number of yielded samples suffices to continue with any number of workers and any batch size."""
    own = _name(loader.batch_sampler) == f"{_TORCHDATA}.BatchSampler" and loader.batch_size is not None
    return own and _name(_sampler(loader)) in _COUNTABLE


def _is_stateful(dataset: object) -> bool:
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def _with_epochs(loader: Any) -> dict[str, Any]:
    parts = {"sampler": _sampler(loader), "dataset": loader.dataset}
    return {
        key: part for key, part in parts.items()
        if callable(getattr(part, "set_epoch", None)) and hasattr(part, "epoch")
    }


def _epochs(loader: Any) -> dict[str, int]:
    return {key: int(part.epoch) for key, part in _with_epochs(loader).items()}


def _generators(loader: Any) -> dict[str, torch.Generator]:
    is_random = _name(loader.sampler) == _RANDOM
    generators = {"loader": loader.generator, "sampler": loader.sampler.generator if is_random else None}
    return {key: generator for key, generator in generators.items() if isinstance(generator, torch.Generator)}


def _start_iterator(loader: Any, state: dict[str, Any]) -> None:
    """Start the iterator during the load. So a mismatch is an error of the load, and the iterator draws its random
    numbers before the random generators are restored.
    """
    loader.load_state_dict(state)
    loader.state_dict()
