"""Every thread of a Checkpointer is in the inventory of docs/ARCHITECTURE.md."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
import torch

import flowstone as fs
from flowstone.save.pacing import Captures
from flowstone.store.base import Pace
from thread_names import inventory, live


@pytest.mark.parametrize("backend", ["auto", "posix"])
def test_each_thread_of_a_save_and_of_a_load_is_in_the_inventory(
    tmp_path: Path, backend: Literal["auto", "posix"]
) -> None:
    model = torch.nn.Linear(2000, 2000)  # several windows
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 2000)).sum().backward()
    optimizer.step()  # torch has started its own
    state = {"model": model, "optimizer": optimizer}
    before = live().keys()
    with fs.Checkpointer(tmp_path, engine=fs.EngineOptions(backend=backend)) as checkpointer:
        checkpointer.save(1, state).committed.result(60)
        with mock.patch.object(Captures, "pace", return_value=Pace(blocks=1, bytes_per_s=1)):  # nothing waits for it
            save = checkpointer.save(2, state)
        names = {name for number, name in live().items() if number not in before}
        save.committed.result(60)
        checkpointer.load(state)
        names |= {name for number, name in live().items() if number not in before}
    assert {"flowstone-commit", "flowstone-capture", "flowstone-act", "fs-write", "fs-worker", "fs-touch"} <= names
    assert names <= inventory(), f"not in docs/ARCHITECTURE.md, Threads: {names - inventory()}"


def test_the_inventory_names_no_thread_that_the_sources_do_not() -> None:
    root = Path(__file__).resolve().parents[2]
    text = "".join(path.read_text() for path in [*(root / "src").rglob("*.py"), *(root / "native").rglob("*.cpp")])
    ours = inventory() - {"iou-wrk", "tokio-rt-worker"}  # the kernel's, and obstore's
    assert ours == {name for name in ours if f'"{name}"' in text}
    assert len(ours) > 10
