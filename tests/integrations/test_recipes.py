"""Samples of docs/RECIPES.md: uninterrupted, and killed and resumed, with the same result bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import check_resumes, is_installed, samples

SAMPLES = samples("RECIPES.md")


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
from lightning import Callback, Trainer
from lightning_module import Module
model = Module()
"""

RECIPES: dict[str, Recipe] = {
    "lightning": Recipe(
        _LOADERS + _LIGHTNING,
        "model=model, optimizer=trainer.optimizers[0], scheduler=trainer.lr_scheduler_configs[0].scheduler",
        ("lightning",),
    ),
    "fabric": Recipe(_LOADERS + "from lightning.fabric import Fabric", _PARTS, ("lightning",)),
    "accelerate": Recipe("from accelerate import Accelerator", _PARTS, ("accelerate",)),
    "averaged": Recipe(
        "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn",
        "model=model, average=average, optimizer=optimizer",
    ),
    "average-by-hand": Recipe("", "model=model, average=average, optimizer=optimizer"),
    "schedule-free": Recipe("import schedulefree", "model=model, optimizer=optimizer", ("schedulefree",)),
    "ddp": Recipe("from torch.nn.parallel import DistributedDataParallel", _PARTS, ranks=2),
}


def test_each_sample_is_run() -> None:
    assert SAMPLES.keys() == {*RECIPES, "order"}


def script(name: str) -> str:
    recipe = RECIPES[name]
    parts = ["import torch\nimport prelude\nfrom prelude import *", recipe.before, SAMPLES["order"], SAMPLES[name]]
    return "\n".join([*parts, f"tell({recipe.parts})\n"])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_is_killed_and_resumed_ends_as_if_it_had_not_been(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    missing = [package for package in recipe.needs if not is_installed(package)]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; make test-integrations runs this")
    check_resumes(script(name), tmp_path, store=name, ranks=recipe.ranks)
