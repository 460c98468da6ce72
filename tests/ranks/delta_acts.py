"""Functions that ranks run in tests of saves that refer to the one before."""

from __future__ import annotations

import torch
from acts import opened
from torch import nn

from flowstone.events.phases import Committed, Event


def once(rank: int, path: str, step: int) -> tuple[int, list[str | None]]:
    """One day of a job: load what is there, train a step, save, load that. The bytes that this rank has written, and
    the homes of all files.
    """
    torch.manual_seed(1)
    base = nn.ModuleList([nn.Linear(1024, 512, bias=False) for _ in range(3)]).requires_grad_(False)
    model = nn.ModuleDict({"base": base, "adapter": nn.Linear(128, 64)})
    optimizer = torch.optim.AdamW(model["adapter"].parameters())
    events: list[Event] = []
    with opened(path, on_event=events.append) as saver:
        if step > 1:
            saver.load({"model": model, "optimizer": optimizer})
        for parameter in model["adapter"].parameters():
            parameter.grad = torch.full_like(parameter, step)
        optimizer.step()
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        made = saver.save(step, {"model": model, "optimizer": optimizer}).committed.result(120)
        for tensor in model.state_dict().values():
            tensor.fill_(-1)
        saver.load({"model": model})
        assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
    (written,) = [event.bytes for event in events if isinstance(event, Committed)]
    return written, [row.home for row in made.manifest.segments]


def saves(rank: int, path: str, changes: int) -> list[int]:
    """Four saves of a frozen base with an adapter, equal on all ranks; before save `changes` one number of the base
    changes. The bytes that this rank has written in each.
    """
    torch.manual_seed(1)
    base = nn.ModuleList([nn.Linear(1024, 512, bias=False) for _ in range(3)]).requires_grad_(False)
    model = nn.ModuleDict({"base": base, "adapter": nn.Linear(128, 64)})
    optimizer = torch.optim.AdamW(model["adapter"].parameters())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    events: list[Event] = []
    with opened(path, on_event=events.append) as saver:
        for step in range(1, 5):
            for parameter in model["adapter"].parameters():
                parameter.grad = torch.full_like(parameter, step)
            optimizer.step()
            if step == changes:
                with torch.no_grad():
                    base[2].weight[0, 0] = 7.0
            saver.save(step, {**state, "step": step}).committed.result(120)
    with opened(path) as other:
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for tensor in model.state_dict().values():
            tensor.fill_(-1)
        other.load({"model": model})
        assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
    return [event.bytes for event in events if isinstance(event, Committed)]
