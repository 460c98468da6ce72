"""Samples of docs/RECIPES.md: to the end, and killed on the way and resumed, with the same result to the last bit."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent.parent / "docs" / "RECIPES.md"
STEPS = 30
KILL_AFTER_BATCHES = 18  # of one each step: between two saves


class Recipe(NamedTuple):
    """What stands around a sample.

    before  imports, and what readers have of their own
    parts   by name: what is compared at the end, as expressions
    needs   packages beside torch, by the names that they are imported by
    """

    before: str
    parts: str
    needs: tuple[str, ...] = ()
    ranks: int = 1


_LOADERS = "from torch.utils.data import DataLoader\n"
_PARTS = "model=model, optimizer=optimizer, scheduler=scheduler"

_LIGHTNING = """
from lightning import Callback, LightningModule, Trainer
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
    def training_step(self, batch, index):
        return loss_of(self.net, batch)
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
model = Module()
"""

RECIPES: dict[str, Recipe] = {
    "lightning": Recipe(
        _LOADERS + _LIGHTNING,
        "model=model, optimizer=trainer.optimizers[0], scheduler=trainer.lr_scheduler_configs[0].scheduler",
        ("lightning",),
    ),
    "fabric": Recipe(_LOADERS + "from lightning.fabric import Fabric", _PARTS, ("lightning",)),
    "averaged": Recipe(
        "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn",
        "model=model, average=average, optimizer=optimizer",
    ),
    "average-by-hand": Recipe("", "model=model, average=average, optimizer=optimizer"),
    "schedule-free": Recipe("import schedulefree", "model=model, optimizer=optimizer", ("schedulefree",)),
    "ddp": Recipe("from torch.nn.parallel import DistributedDataParallel", _PARTS, ranks=2),
}


def samples() -> dict[str, str]:
    return dict(re.findall(r"^```python ([\w-]+)\n(.*?)^```", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE))


def test_each_sample_is_run() -> None:
    assert samples().keys() == {*RECIPES, "order"}


def script(name: str) -> str:
    recipe = RECIPES[name]
    parts = ["import torch\nimport prelude\nfrom prelude import *", recipe.before, samples()["order"], samples()[name]]
    return "\n".join([*parts, f"tell({recipe.parts})\n"])


def play(name: str, folder: Path, run: str, *, kill_after_batches: int = 0) -> list[int]:
    """One run of a sample, on all of its ranks; their exit codes. Once one has failed, the others are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = RECIPES[name].ranks
    processes = []
    for rank in range(ranks):
        where: Mapping[str, Any] = {
            "RECIPE": name, "RECIPE_RUN": str(folder / run), "RECIPE_KILL_AFTER_BATCHES": str(kill_after_batches),
            "PYTHONPATH": str(HERE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
            "WORLD_SIZE": str(ranks), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        }
        environment = {**os.environ, **where}
        if ranks == 1:
            del environment["RANK"], environment["WORLD_SIZE"]
        with (folder / f"{run}-{rank}.txt").open("w") as said:
            processes.append(subprocess.Popen(
                [sys.executable, "-c", script(name)], cwd=folder, env=environment, stdout=said, stderr=said,
            ))
    deadline = time.monotonic() + 900
    try:
        codes = [one.poll() for one in processes]
        while None in codes and set(codes) <= {None, 0} and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [one.poll() for one in processes]
        return [code for code in codes if code is not None]
    finally:
        for one in processes:
            one.kill()
            one.wait()


def told(folder: Path, run: str, rank: int = 0) -> Any:
    found = folder / run / f"{rank}.json"
    assert found.exists(), (folder / f"{run}-{rank}.txt").read_text()
    return json.loads(found.read_text())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_is_killed_and_resumed_ends_as_if_it_had_not_been(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    missing = [package for package in recipe.needs if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; make test-integrations runs this")
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    assert set(play(name, calm, "undisturbed")) == {0}, (calm / "undisturbed-0.txt").read_text()
    codes = play(name, killed, "cut-short", kill_after_batches=KILL_AFTER_BATCHES)
    assert -signal.SIGKILL in codes, (killed / "cut-short-0.txt").read_text()
    assert set(play(name, killed, "resumed")) == {0}, (killed / "resumed-0.txt").read_text()
    for rank in range(recipe.ranks):
        expected, found = told(calm, "undisturbed", rank), told(killed, "resumed", rank)
        assert len(expected["batches"]) == STEPS
        assert STEPS - KILL_AFTER_BATCHES < len(found["batches"]) <= STEPS - 5, "it resumed, behind what was saved"
        assert found["batches"] == expected["batches"][-len(found["batches"]):]
        assert found["parts"] == expected["parts"]
