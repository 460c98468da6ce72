"""Training with a data loader of others, saved through Flowstone: one process of it, on one rank or several.

    python loaders_act.py JSON

kind     the loader: a name of LOADERS
runs     the directory of checkpoints
out      where rank r writes what it ends with, with "-r.json" behind it
kill_at  the step behind which all ranks end by SIGKILL, once step 10 is committed
step     the step to load, or nothing for the newest
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from torch import nn

import flowstone as fs
from flowstone.adapters.loaders import resumable

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
WIDTH, SAMPLES, EPOCHS = 160, 96, 2
BATCH = 8  # of all ranks together


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor(index), "x": row(index)}


def row(index: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def torchdata_loader(workers: int = 0) -> tuple[Any, Any]:
    """The loader, and what is told of a new epoch."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(Rows(), RANKS, RANK, seed=5)
    return StatefulDataLoader(Rows(), batch_size=BATCH // RANKS, sampler=sampler, num_workers=workers), sampler


def examples(shards: list[int]) -> Any:
    for shard in shards:
        for index in range(32 * shard, 32 * shard + 32):
            yield {"number": index}


def rows_of(counts: list[dict[str, int]]) -> dict[str, torch.Tensor]:
    numbers = [row["number"] for row in counts]
    return {"number": torch.tensor(numbers), "x": torch.stack([row(number) for number in numbers])}


def streamed() -> tuple[Any, Any]:
    """Three shards, of which each of two ranks takes every other example."""
    from datasets import IterableDataset
    from datasets.distributed import split_dataset_by_node

    dataset = IterableDataset.from_generator(examples, gen_kwargs={"shards": [0, 1, 2]})
    dataset = split_dataset_by_node(dataset.map(lambda value: value), RANK, RANKS)
    own = {"batch_size": BATCH // RANKS, "collate_fn": rows_of, "generator": torch.Generator()}
    return torch.utils.data.DataLoader(dataset, **own), dataset


def mosaic_loader(workers: int = 0) -> tuple[Any, Any]:
    """Ranks share the data set on the disk, which the test has written; it counts its epochs by itself."""
    from mosaic import streaming

    dataset = streaming().StreamingDataset(
        local=os.environ["LOADERS_DATA"], shuffle=True, shuffle_seed=5, num_canonical_nodes=1,
        batch_size=BATCH // RANKS,
    )
    loader = streaming().StreamingDataLoader(
        dataset, batch_size=BATCH // RANKS, num_workers=workers, collate_fn=rows_of, generator=torch.Generator(),
    )
    return loader, SimpleNamespace(set_epoch=lambda epoch: None)


LOADERS = {
    "datasets": streamed, "streaming": mosaic_loader, "streaming-workers": lambda: mosaic_loader(2),
    "torchdata": torchdata_loader, "torchdata-workers": lambda: torchdata_loader(2),
}


def end_at(record: dict[str, Any], step: int) -> None:
    if step == record.get("kill_at"):
        while not list(Path(record["runs"]).glob("step-*10/manifest.json")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    record = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(7 if not Path(record["runs"]).exists() else 99)  # a load leaves nothing of the latter
    if RANKS > 1:
        dist.init_process_group("gloo")
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, 1))
    model = nn.parallel.DistributedDataParallel(model) if RANKS > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, epochs = LOADERS[record["kind"]]()
    section = resumable(epochs if record["kind"] == "datasets" else loader)
    state = {"model": model, "optimizer": optimizer, "loader": section, "rng": fs.rng()}
    state |= {"epoch": 0, "step": 0}
    numbers: list[list[int]] = []
    with fs.Checkpointer(record["runs"]) as ckpt:
        if ckpt.latest() is not None:
            ckpt.load(state, step=record.get("step"))
        begun = state["step"]
        for epoch in range(state["epoch"], EPOCHS):
            epochs.set_epoch(epoch)
            state["epoch"] = epoch
            for batch in loader:
                model(batch["x"]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                state["step"] += 1
                numbers.append(batch["number"].tolist())
                if state["step"] % 5 == 0 and not record.get("step"):
                    ckpt.save(state["step"], state)
                end_at(record, state["step"])
    parts = {"model": digest(model.state_dict()), "optimizer": digest(optimizer.state_dict())}
    parts["generator"] = digest(torch.get_rng_state())
    Path(f"{record['out']}-{RANK}.json").write_text(json.dumps({"parts": parts, "begun": begun, "numbers": numbers}))
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process


if __name__ == "__main__":
    main()
