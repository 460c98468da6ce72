"""Parameters that no optimizer of the state owns.

Averages and similar tensors are captured before `save` returns, and frozen ones late, once they are known to be frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flowstone as fs
from flowstone.events.phases import Captured, Event, SaveStarted
from lagging_loops import MIB, WIDTH, backward, failure, network, training, waiting


@torch.no_grad()
def by_data(average: nn.Module, model: nn.Module) -> None:
    """As most do it by hand: it moves no counter."""
    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
        mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


@torch.no_grad()
def in_place(average: nn.Module, model: nn.Module) -> None:
    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
        mine.lerp_(theirs, 0.1)


@torch.no_grad()
def foreach(average: nn.Module, model: nn.Module) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)


def averaged(average: nn.Module, model: nn.Module) -> None:
    average.update_parameters(model)  # type: ignore[operator]


AVERAGES: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module, nn.Module], None]]] = {
    "by .data": (copy.deepcopy, by_data),
    "in place": (copy.deepcopy, in_place),
    "foreach": (lambda model: copy.deepcopy(model).requires_grad_(False), foreach),
    "AveragedModel": (AveragedModel, averaged),
    "EMA": (lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True), averaged),
}


def values(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{key.removeprefix('module.')}": tensor.clone() for key, tensor in module.state_dict().items()}


def assert_holds(path: Path, step: int, expected: dict[str, torch.Tensor]) -> None:
    checkpoint = fs.open(path, step=step)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor), name


@pytest.mark.parametrize("every", [1, 3], ids=["updated at each step", "updated seldom"])
@pytest.mark.parametrize("how", AVERAGES)
def test_an_average_that_is_updated_right_after_save_is_saved_as_it_was(tmp_path: Path, how: str, every: int) -> None:
    model, optimizer = training()
    make, update = AVERAGES[how]
    average = make(model)
    expected = {}
    with waiting(tmp_path, saves_in_flight=3) as checkpointer:
        for step in range(1, 8):
            backward(model)
            optimizer.step()
            expected[step] = values(model, "model") | values(average, "average")
            save = checkpointer.save(step, {"model": model, "average": average, "optimizer": optimizer})
            if step % every == 0:
                update(average, model)
            optimizer.zero_grad()
            assert failure(save) is None
    for step, tensors in expected.items():
        assert_holds(tmp_path, step, tensors)


def test_an_encoder_that_follows_inside_of_the_model_is_saved_as_it_was(tmp_path: Path) -> None:
    """MoCo and its kin: both are one module, and only one of them is stepped."""
    model = nn.ModuleDict({"query": network(), "key": network().requires_grad_(False)})
    optimizer = torch.optim.SGD(model["query"].parameters(), lr=0.1)
    expected = {}
    with waiting(tmp_path) as checkpointer:
        for step in range(1, 5):
            expected[step] = values(model, "model")
            save = checkpointer.save(step, {"model": model, "optimizer": optimizer})
            by_data(model["key"], model["query"])
            backward(model["query"])
            optimizer.step()
            assert failure(save) is None
    for step, tensors in expected.items():
        assert_holds(tmp_path, step, tensors)


def test_an_average_inside_of_the_model_that_begins_late_is_saved_as_it_was(tmp_path: Path) -> None:
    model, _ = training()
    whole = nn.ModuleDict({"model": model, "average": AveragedModel(model)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with waiting(tmp_path) as checkpointer:
        for step in range(1, 6):
            expected = values(whole, "model")
            save = checkpointer.save(step, {"model": whole, "optimizer": optimizer})
            if step > 3:
                whole["average"].update_parameters(model)
            assert failure(save) is None
            assert_holds(tmp_path, step, {k: v for k, v in expected.items() if ".module." not in k})


def adapted() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A frozen base of 3 MiB, and an adapter that is trained."""
    model = nn.ModuleDict({"base": network().requires_grad_(False), "adapter": nn.Linear(WIDTH, WIDTH)})
    return model, torch.optim.SGD(model["adapter"].parameters(), lr=0.1)


def run(path: Path, saves: int, between: Callable[[int, nn.Module], None]) -> tuple[list[Any], list[Any], list[bool]]:
    """Save so often; what was captured early each time, whether the plan was known, and whether the save failed."""
    events: list[Event] = []
    failed = []
    model, optimizer = adapted()
    with waiting(path, on_event=events.append) as checkpointer:
        for step in range(1, saves + 1):
            save = checkpointer.save(step, {"model": model, "optimizer": optimizer})
            between(step, model)
            failed.append(isinstance(failure(save), fs.StateChangedError))
            for parameter in model["adapter"].parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
    early = [event.early_bytes // MIB for event in events if isinstance(event, Captured)]
    return early, [event.plan_cached for event in events if isinstance(event, SaveStarted)], failed


def test_frozen_weights_are_captured_late_from_the_second_save_on_and_plans_are_kept(tmp_path: Path) -> None:
    early, cached, failed = run(tmp_path, 4, lambda step, model: None)
    assert early == [3, 0, 0, 0]
    assert cached == [False, False, True, True]
    assert not any(failed)


@pytest.mark.parametrize("how", ["in place", "by .data", "swapped"])
def test_weights_that_change_between_saves_are_not_taken_for_frozen(tmp_path: Path, how: str) -> None:
    def between(step: int, model: nn.Module) -> None:
        for parameter in model["base"].parameters():  # type: ignore[index]
            if how == "swapped":
                parameter.data = parameter.data + 1
            else:
                (parameter.data if how == "by .data" else parameter).add_(1)

    early, _, failed = run(tmp_path, 4, between)
    assert early == [3, 3, 3, 3]
    assert not any(failed)


def test_frozen_weights_that_thaw_fail_one_save_by_name_and_are_captured_early_from_then_on(tmp_path: Path) -> None:
    def between(step: int, model: nn.Module) -> None:
        if step == 3:
            with torch.no_grad():
                model["base"][2].weight[5, 5] += 1  # type: ignore[index]

    early, _, failed = run(tmp_path, 6, between)
    assert early == [3, 0, 0, 1, 1, 1]
    assert failed == [False, False, True, False, False, False]


def test_a_load_into_frozen_weights_is_no_thaw(tmp_path: Path) -> None:
    events: list[Event] = []
    model, optimizer = adapted()
    state = {"model": model, "optimizer": optimizer}
    with waiting(tmp_path, on_event=events.append) as checkpointer:
        for step in (1, 2, 3, 4):
            assert failure(checkpointer.save(step, state)) is None
            if step == 2:
                checkpointer.load(state)
    early = [event.early_bytes // MIB for event in events if isinstance(event, Captured)]
    assert early == [3, 0, 3, 0]


def test_a_model_of_which_nothing_is_trained_is_captured_early_however_long_it_stays(tmp_path: Path) -> None:
    """A teacher cannot be told from an average that begins late."""
    model, optimizer = training()
    other = network().requires_grad_(False)
    with waiting(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            save = checkpointer.save(step, {"model": model, "other": other, "optimizer": optimizer})
            assert not save.captured.done()
            if step == 3:
                in_place(other, model)
            assert failure(save) is None


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_renormalises_what_it_looks_up_is_saved_as_it_was(
    tmp_path: Path, kind: Callable[..., nn.Module]
) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"table": kind(4000, 64, max_norm=1.0), "head": network()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with waiting(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            expected = values(model, "model")
            save = checkpointer.save(step, {"model": model, "optimizer": optimizer})
            actual = model["table"](torch.randint(0, 4000, (16, 2)))
            assert not torch.equal(model["table"].weight, expected["model.table.weight"])
            assert not save.captured.done(), "the moments of it are captured late"
            actual.sum().backward()
            optimizer.step()
            assert failure(save) is None
            assert_holds(tmp_path, step, expected)
