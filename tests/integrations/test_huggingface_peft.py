"""PEFT through Flowstone: only adapters are saved, resumed bit for bit, and refused with another base."""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import flowstone as fs

pytest.importorskip("peft", reason="`make test-integrations` installs it")

import peft
from accelerate import Accelerator
from trainer_act import digest, ended, made_trainer, with_adapters

from flowstone.adapters.huggingface import use_flowstone
from flowstone.adapters.huggingface.peft_adapters import BaseModels

ACT = str(Path(__file__).with_name("trainer_act.py"))


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


def act(folder: Path, run: str, **value: Any) -> list[int]:
    return run_ranks([ACT, json.dumps({"out": str(folder / "out"), "adapters": True, **value})], folder / run)


def trained(out: Path, model: Any, **given: Any) -> Any:
    trainer = use_flowstone(made_trainer(out, [], model, **{"max_steps": 5, **given}))
    trainer.train()
    return trainer


def test_adapters_that_are_killed_and_resumed_end_as_the_trainer_by_itself(tmp_path: Path) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir(), killed.mkdir()
    assert act(calm, "undisturbed", flowstone=False) == [0], (calm / "undisturbed-0.txt").read_text()
    assert act(killed, "cut-short", kill_at=18) == [-signal.SIGKILL], (killed / "cut-short-0.txt").read_text()
    assert act(killed, "resumed", resume="last") == [0], (killed / "resumed-0.txt").read_text()
    assert json.loads((killed / "out-0.json").read_text()) == json.loads((calm / "out-0.json").read_text())


def test_a_checkpoint_has_adapters_and_says_which_base(tmp_path: Path) -> None:
    model = with_adapters(modules_to_save=["wpe"])
    trained(tmp_path, model)
    checkpoint = fs.open(tmp_path)
    names = [name for name in checkpoint.tensors if name.startswith("model.")]
    expected = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.removeprefix("model.") for name in names} == expected
    assert {"model.base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight"} <= set(names)
    assert checkpoint.objects["base"]["name"] == "tiny/base"
    assert len(checkpoint.objects["base"]["digest"]) == 16
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    stored = sum(path.stat().st_size for path in (tmp_path / "step-00000005").iterdir())
    assert stored < whole / 4
    state_dict = checkpoint.state_dict("model")
    assert all(torch.equal(state_dict[name], tensor) for name, tensor in model.state_dict().items() if name in expected)


def test_another_base_is_refused_by_name_and_nothing_changes(tmp_path: Path) -> None:
    trained(tmp_path, with_adapters())
    other = with_adapters(seed=11, name="tiny/other")
    before = digest(other.state_dict())
    with pytest.raises(fs.MismatchError, match="belong to another base model") as caught:
        use_flowstone(made_trainer(tmp_path, [], other)).train(resume_from_checkpoint=True)
    assert "tiny/base, digest " in str(caught.value.facts["stored"])
    assert "tiny/other, digest " in str(caught.value.facts["wanted"])
    assert digest(other.state_dict()) == before


def test_the_same_base_under_another_name_is_accepted(tmp_path: Path) -> None:
    first = ended(trained(tmp_path, with_adapters()))
    trainer = use_flowstone(made_trainer(tmp_path, [], with_adapters(name="/models/base"), max_steps=5))
    trainer.train(resume_from_checkpoint=True)
    assert ended(trainer)["model"] == first["model"]


def test_other_adapters_over_the_same_base_are_told_tensor_by_tensor(tmp_path: Path) -> None:
    trained(tmp_path, with_adapters())
    with pytest.raises(fs.MismatchError, match="lora_A"):
        use_flowstone(made_trainer(tmp_path, [], with_adapters(r=4))).train(resume_from_checkpoint=True)


def test_a_base_of_tensors_that_are_no_plain_ones_is_told_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(torch.nn.Parameter):
        """Like a quantised parameter of another library."""

    def odd(name: str) -> Any:
        model = with_adapters(name=name)
        model.base_model.model.transformer.ln_f.weight.__class__ = Odd
        return model

    with caplog.at_level(logging.INFO):
        trained(tmp_path, odd("tiny/base"))
    assert "is a test_a_base" in caplog.text
    assert fs.open(tmp_path).objects["base"] == {"name": "tiny/base", "digest": ""}
    with pytest.raises(fs.MismatchError, match="tiny/other, not digested"):
        use_flowstone(made_trainer(tmp_path, [], odd("tiny/other"))).train(resume_from_checkpoint=True)


def test_a_base_that_is_offloaded_is_told_by_its_name(tmp_path: Path) -> None:
    accelerator = use_flowstone(Accelerator(cpu=True))
    model = accelerator.prepare(with_adapters())
    model.base_model.model.transformer.ln_f.to("meta")
    accelerator.save_state(tmp_path / "step_1")
    accelerator.end_training()
    assert fs.open(tmp_path).objects["base"] == {"name": "tiny/base", "digest": ""}


class Packed(torch.nn.Module):
    """A linear layer as GPTQ's: its weight is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.randint(-8, 8, (8, 8), dtype=torch.int32))
        self.register_buffer("scales", torch.full((8,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.qweight * self.scales)


class Masked(torch.nn.Module):
    """A layer that counts, beside a mask and a table of integers: what is no weight makes no layer a quantised one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).tril())
        self.register_buffer("table", torch.arange(64).view(8, 8))
        self.register_buffer("running_mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running_mean.lerp_(x.detach().mean(0), 0.1)
        return x @ self.mask.float()


def over_statistics(seed: int = 7) -> tuple[Accelerator, Any]:
    """Adapters over a base with BatchNorm, a packed layer and one that counts."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    packed = Packed()
    torch.manual_seed(7)
    base = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), packed, Masked())
    accelerator = use_flowstone(Accelerator(cpu=True))
    model = accelerator.prepare(get_peft_model(base, LoraConfig(target_modules=["0"])))
    accelerator.prepare(torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad))
    return accelerator, model


def test_statistics_of_a_base_go_with_the_adapters(tmp_path: Path) -> None:
    accelerator, model = over_statistics()
    for step in (1, 2):
        accelerator.backward(model(torch.randn(4, 8)).sum())
        accelerator._optimizers[0].step()
        accelerator.save_state(tmp_path / f"step_{step}")
    accelerator.end_training()
    names = [name for name in fs.open(tmp_path).tensors if name.startswith("model.") and "lora_" not in name]
    assert sorted(name.removeprefix("model.base_model.model.") for name in names) == [
        "1.num_batches_tracked", "1.running_mean", "1.running_var", "3.mask", "3.running_mean", "3.table",
    ]
    again, resumed = over_statistics()
    again.load_state(tmp_path)
    assert digest(resumed.state_dict()) == digest(model.state_dict())
    assert resumed.base_model.model[1].num_batches_tracked == 2
    again.end_training()
    other, _ = over_statistics(seed=11)
    with pytest.raises(fs.MismatchError, match="belong to another base model"):
        other.load_state(tmp_path)
    other.end_training()


def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    model = with_adapters()
    trainer = made_trainer(
        tmp_path, [], model, max_steps=15, eval_strategy="steps", eval_steps=5, metric_for_best_model="score",
        greater_is_better=True, load_best_model_at_end=True,
    )
    scores = iter([1.0, 9.0, 2.0])
    trainer.compute_metrics = lambda _: {"score": next(scores)}
    use_flowstone(trainer).train()
    best = fs.open(tmp_path, step=10).state_dict("model")
    assert best
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in best.items())


def test_an_accelerator_saves_adapters_alone(tmp_path: Path) -> None:
    accelerator = use_flowstone(Accelerator(cpu=True))
    model = accelerator.prepare(with_adapters())
    optimizer = accelerator.prepare(torch.optim.AdamW(param for param in model.parameters() if param.requires_grad))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    before = digest(model.state_dict())
    accelerator.save_state(tmp_path / "step_1")
    accelerator._flowstone._checkpointer.fence()
    for parameter in model.parameters():
        parameter.data.add_(1) if parameter.requires_grad else None
    accelerator.load_state(tmp_path / "step_1")
    assert digest(model.state_dict()) == before
    assert all("lora_" in name for name in fs.open(tmp_path).tensors if name.startswith("model."))
    accelerator.end_training()
    other = use_flowstone(Accelerator(cpu=True))
    model = other.prepare(with_adapters(seed=11))
    other.prepare(torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad))
    with pytest.raises(fs.MismatchError, match="belong to another base model"):
        other.load_state(tmp_path / "step_1")


def test_a_save_leaves_alone_what_a_pass_has_gathered(tmp_path: Path) -> None:
    """FSDP2 shards again at a state_dict(), which is fatal to a pass on another thread."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        inner = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), peft.LoraConfig(target_modules=["0"], r=2))
        fully_shard(inner, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
        inner(torch.ones(1, 8))
        assert not any(isinstance(parameter, DTensor) for parameter in inner.parameters()), "gathered"
        sections = BaseModels().sections(inner, 0)
        assert not any(isinstance(parameter, DTensor) for parameter in inner.parameters()), "gathered still"
        adapters: Any = sections["model"]
        parameters = dict(adapters.named_parameters())
        assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
        assert len(parameters) == 2
    finally:
        dist.destroy_process_group()
