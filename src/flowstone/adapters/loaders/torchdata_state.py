"""The structure of the state of torchdata 0.11's StatefulDataLoader.

Without workers it is the iterator's state. With workers it has a snapshot of the iterator and of each worker, and the
number of batches since the snapshot. `_sampler_iter_state` is the state of torchdata's BatchSampler: `samples_yielded`,
and the states of its sampler and of the sampler's iterator.
"""

from __future__ import annotations

from typing import Any

import torch


def corrected_state(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of torchdata's state with one number corrected; otherwise the rest of an epoch would be skipped.

    Until the first sample of an epoch is drawn, a StatefulDistributedSampler still has the number of samples of the
    previous epoch. The number in its BatchSampler is correct.
    """
    main = _main(state)
    batches = main["_sampler_iter_state"]
    if not isinstance(batches, dict) or "yielded" not in (batches.get("sampler_state") or ()):
        return state
    mended = batches | {"sampler_state": batches["sampler_state"] | {"yielded": batches["samples_yielded"]}}
    main = main | {"_sampler_iter_state": mended}
    return main if "_snapshot" not in state else state | {"_snapshot": state["_snapshot"] | {"_main_snapshot": main}}


def samples_yielded(loader: Any, state: dict[str, Any]) -> int:
    """How many samples the loader has yielded in this epoch, if torchdata makes the batches."""
    since = state.get("_steps_since_snapshot", 0) * loader.batch_size
    yielded: int = _main(state)["_sampler_iter_state"]["samples_yielded"] + since
    return min(len(loader.sampler), yielded)


def has_dataset_state(state: dict[str, Any]) -> bool:
    """Whether the state includes a state of the dataset, in the loader's own process or in a worker."""
    workers = [state] if "_snapshot" not in state else state["_snapshot"]["_worker_snapshots"].values()
    return any(worker[key] is not None for worker in workers for key in ("dataset_state", "fetcher_state"))


def state_after(loader: Any, samples: int, saved: dict[str, Any] | None) -> dict[str, Any]:
    """A state for a loader that has yielded this number of samples, with any number of workers and any batch size.

    saved  the saved loader's state; None if its sampler does not need it to recompute the order
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
    """The state of the loader's own process, without the workers' states."""
    main: dict[str, Any] = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
    return main
