"""The structure of the state that torchdata 0.11's StatefulDataLoader saves.

Without workers it is that of the iterator; with workers it is a snapshot of it, and of each worker, with the number of
batches since then. `_sampler_iter_state` is that of torchdata's BatchSampler: `samples_yielded`, and what its sampler
and the iterator of that have saved.
"""

from __future__ import annotations

from typing import Any

import torch


def consistent(state: dict[str, Any]) -> dict[str, Any]:
    """A state of torchdata with one defect mended, for which the rest of the epoch would be lost.

    Until the first sample of an epoch is drawn, a StatefulDistributedSampler still counts those of the epoch before.
    Its batches count for themselves.
    """
    main = _main(state)
    batches = main["_sampler_iter_state"]
    if not isinstance(batches, dict) or "yielded" not in (batches.get("sampler_state") or ()):
        return state
    mended = batches | {"sampler_state": batches["sampler_state"] | {"yielded": batches["samples_yielded"]}}
    main = main | {"_sampler_iter_state": mended}
    return main if "_snapshot" not in state else state | {"_snapshot": state["_snapshot"] | {"_main_snapshot": main}}


def samples_yielded(loader: Any, state: dict[str, Any]) -> int:
    """How many samples of this epoch the loader has yielded, whose batches torchdata makes of a sampler."""
    since = state.get("_steps_since_snapshot", 0) * loader.batch_size
    yielded: int = _main(state)["_sampler_iter_state"]["samples_yielded"] + since
    return min(len(loader.sampler), yielded)


def has_dataset_state(state: dict[str, Any]) -> bool:
    """Whether the dataset has saved something too, here or in a worker."""
    workers = [state] if "_snapshot" not in state else state["_snapshot"]["_worker_snapshots"].values()
    return any(one[key] is not None for one in workers for key in ("dataset_state", "fetcher_state"))


def begun_at(loader: Any, samples: int, saved: dict[str, Any] | None) -> dict[str, Any]:
    """The state of a loader that has yielded so many samples, whatever workers and batches it has.

    saved  the state of the loader that did; None if its sampler needs none to find the order again
    """
    before = _main(saved) if saved else {}
    iterator: dict[str, Any] = {"samples_yielded": samples}
    if callable(getattr(loader.sampler, "state_dict", None)):
        iterator["sampler_state"] = {"yielded": samples}
    if "sampler_iter_state" in (before.get("_sampler_iter_state") or ()):
        iterator["sampler_iter_state"] = before["_sampler_iter_state"]["sampler_iter_state"] | {"yielded": samples}
    steps = samples // loader.batch_size
    main = {
        "_sampler_iter_state": iterator, "_index_sampler_state": None, "_sampler_iter_yielded": steps,
        "_IterableDataset_len_called": None, "_shared_seed": None,
    }
    if not loader.num_workers:
        own = {"_num_yielded": steps, "fetcher_state": None, "dataset_state": None, "_iterator_finished": False}
        return main | own
    seed = before.get("_base_seed")
    if seed is None:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
    snapshot = {
        "_snapshot_step": steps, "_last_yielded_worker_id": loader.num_workers - 1, "_worker_snapshots": {},
        "_main_snapshot": main | {"_num_workers": loader.num_workers, "_base_seed": seed},
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": False}


def _main(state: dict[str, Any]) -> dict[str, Any]:
    """What the process of the loader has saved, where workers save for themselves."""
    found: dict[str, Any] = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
    return found
