"""Steps that are saved in full keep the promise of a journal about steps that are not durable when `save` returns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flowstone as fs


def _lbfgs() -> tuple[torch.nn.Linear, torch.optim.LBFGS]:
    torch.manual_seed(0)
    model = torch.nn.Linear(700, 600)
    return model, torch.optim.LBFGS([model.bias], lr=1e-2, max_iter=1)


def _step(model: torch.nn.Linear, optimizer: torch.optim.LBFGS) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 700)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


@pytest.mark.parametrize("lag_steps", [1, 2])
def test_no_more_steps_are_open_than_may_lag_when_save_returns(tmp_path: Path, lag_steps: int) -> None:
    model, optimizer = _lbfgs()
    saves: list[fs.Save] = []
    reported: list[object] = []
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with fs.Checkpointer(tmp_path, every_step=True, lag_steps=lag_steps, on_event=reported.append) as checkpointer:
        for step in range(1, 9):
            _step(model, optimizer)
            state["step"] = step
            saves.append(checkpointer.save(step, state))
            assert all(save.committed.done() for save in saves[:-lag_steps])
    assert len([event for event in reported if isinstance(event, fs.NotJournaled)]) >= 7, "each is saved whole"


def test_steps_behind_a_checkpoint_that_nothing_leads_to_wait_for_it(tmp_path: Path) -> None:
    """In the middle of a run: what was durable before is far behind while that is written."""
    torch.manual_seed(0)
    model = torch.nn.Linear(700, 600)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saves: list[fs.Save] = []
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        for step in range(1, 10):
            model(torch.ones(2, 700)).square().mean().backward()
            optimizer.step()
            if step in (4, 7):
                with torch.no_grad():
                    model.weight.mul_(0.5)  # no optimizer has done that: the step is saved whole
            saves.append(checkpointer.save(step, {"model": model, "optimizer": optimizer, "step": step}))
            if step > 3:
                assert [save.step for save in saves if not save.committed.done()] in ([], [step])
            else:
                saves[0].committed.result()


IMPORTS = os.pathsep.join(map(str, [Path(__file__).parent, Path(__file__).parents[1] / "support"]))
_KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[2].split(os.pathsep)
from test_every_step_saved_full import _lbfgs, _step
import flowstone as fs
model, optimizer = _lbfgs()
state = {"model": model, "optimizer": optimizer, "step": 0}
checkpointer = fs.Checkpointer(sys.argv[1], every_step=True)
for step in range(1, 6):
    _step(model, optimizer)
    state["step"] = step
    checkpointer.save(step, state)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_after_save_returns_loses_the_last_step_at_most(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path), IMPORTS]
    subprocess.run(command, check=False)
    assert fs.open(tmp_path).step >= 4
