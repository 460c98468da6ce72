"""Tests that need a GPU: devices of slots, generators, memory described by its device."""

from __future__ import annotations

import pytest
import torch
from reference import load, save, stored

from flowstone.state import describe, prepare
from flowstone.state.kinds.generator import rng

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def trained(steps: int, **options: object) -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]
    for _ in range(steps):
        model(torch.ones(2, 4, device="cuda")).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def slots(state: dict[str, object]) -> dict[str, torch.Tensor]:
    return dict(state["optimizer"].state[state["model"].weight])  # type: ignore[attr-defined]


OPTIONS: list[dict[str, object]] = [{}, {"fused": True}, {"capturable": True}, {"foreach": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_slots_are_created_on_the_device_that_torch_gives_them(options: dict[str, object]) -> None:
    state, target = trained(3, **options), trained(0, **options)
    load(save(state), target)
    for name, slot in slots(state).items():
        assert slots(target)[name].device == slot.device, name
        assert torch.equal(slots(target)[name], slot), name


def test_a_tensor_lr_on_the_device_is_written_in_place() -> None:
    def make(lr: float) -> dict[str, object]:
        return trained(1, lr=torch.tensor(lr, device="cuda"), capturable=True)

    target = make(0.5)
    held = target["optimizer"].param_groups[0]["lr"]  # type: ignore[attr-defined]
    load(save(make(0.25)), target)
    assert target["optimizer"].param_groups[0]["lr"] is held  # type: ignore[attr-defined]
    assert held.item() == 0.25


def test_memory_names_its_device() -> None:
    memory = describe({"t": torch.arange(6.0, device="cuda").view(2, 3).t()}).places.strided[0]
    assert memory.device == "cuda:0"
    assert memory.strides_bytes == (4, 12)


def test_tensors_survive_on_the_device_and_across() -> None:
    state = {"t": torch.arange(6, device="cuda")[::2], "b": torch.ones(3, device="cuda").bfloat16()}
    target = {"t": torch.zeros(3, dtype=torch.int64), "b": torch.zeros(3, device="cuda").bfloat16()}
    load(save(state), target)
    assert torch.equal(target["t"], state["t"].cpu())
    assert torch.equal(target["b"], state["b"])


def test_gpu_generators_go_on_with_the_same_numbers() -> None:
    torch.rand(1, device="cuda")
    checkpoint = save({"rng": rng(), "own": torch.Generator("cuda")})
    expected = torch.rand(3, device="cuda")
    load(checkpoint, {"rng": rng(), "own": torch.Generator("cuda")})
    assert torch.equal(torch.rand(3, device="cuda"), expected)


def test_a_cpu_generators_state_does_not_fit_a_gpus() -> None:
    differences = prepare({"g": torch.Generator("cuda")}, stored(save({"g": torch.Generator()}))).differences
    assert [d.kind for d in differences] == ["kind"]
