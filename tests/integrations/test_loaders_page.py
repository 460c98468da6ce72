"""Samples of docs/LOADERS.md: killed during the run and resumed, with the same result bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import check_resumes, is_installed

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "LOADERS.md"
PACKAGES = {"torchdata": "torchdata", "datasets": "datasets", "streaming": "mosaicml-streaming"}
BEFORE = """import torch
import prelude
from prelude import *
"""
STREAM = """from datasets import IterableDataset
def rows(shards):
    for shard in shards:
        for number in range(10 * shard, 10 * shard + 10):
            yield {key: value.tolist() for key, value in data[number].items()}
stream = IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]}).with_format("torch")
"""
SHARDS = """import os, time
from mosaic import streaming
if os.environ.get("RANK") == "0" and not os.path.exists("data"):
    with streaming().MDSWriter(out="half-written", columns={"x": "ndarray:float32", "y": "ndarray:float32"}) as writer:
        for number in range(len(data)):
            writer.write({key: value.numpy() for key, value in data[number].items()})
    os.rename("half-written", "data")
while not os.path.exists("data"):
    time.sleep(0.01)
streaming()
"""
BEFORE_A_SAMPLE = {"datasets": STREAM, "streaming": SHARDS}


def samples() -> dict[str, str]:
    return dict(re.findall(r"^```python ([\w-]+)\n(.*?)^```", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE))


def test_each_sample_is_run() -> None:
    assert samples().keys() == PACKAGES.keys()


@pytest.mark.parametrize("name", PACKAGES)
def test_a_sample_that_is_killed_and_resumed_ends_as_if_it_had_not_been(name: str, tmp_path: Path) -> None:
    if not is_installed(PACKAGES[name]):
        pytest.skip(f"{PACKAGES[name]}: not installed; make test-integrations runs this")
    before = BEFORE + BEFORE_A_SAMPLE.get(name, "")
    end = "tell(model=model, optimizer=optimizer, scheduler=scheduler)\n"
    check_resumes(before + samples()[name] + end, tmp_path, store=name, ranks=2)
