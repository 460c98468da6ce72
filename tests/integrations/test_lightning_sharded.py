"""Sharded strategies of docs/LIGHTNING.md: killed and resumed, also on other numbers of ranks; policies; failures."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from jobs import check_resumes, is_installed, play, samples

import flowstone as fs

if not is_installed("lightning"):
    pytest.skip("`make test-integrations` installs lightning", allow_module_level=True)

from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from flowstone.adapters.lightning import FlowstoneIO, GeneratorStates, flowstone_strategy

SAMPLES = samples("LIGHTNING.md")

BEFORE = """
import os, resource, sys, torch, prelude, lightning_sharded
from pathlib import Path
import torch.distributed as dist
from prelude import *
from lightning_sharded import network, sharded, whole
from torch.utils.data import DataLoader
prelude.STORE = Path("runs/sharded")
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
"""
MODULE = """
from lightning_order import Order
from lightning.pytorch import Trainer, Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
class Module(lightning_sharded.Module):
    def on_load_checkpoint(self, checkpoint):
        order.begin = 4 * checkpoint["global_step"]
model, order = Module(), Order(RANKS)
if os.environ["RECIPE_RUN"].endswith("resumed"):  # nothing of this may be left after a load
    for parameter in model.parameters():
        parameter.data.fill_(9)
loader = DataLoader(data, batch_size=4, sampler=order, generator=torch.Generator())
options = dict(accelerator="cpu", devices=RANKS, logger=False, enable_progress_bar=False, enable_model_summary=False,
               use_distributed_sampler=False)
def trained(steps, callbacks, strategy=None, path=None):
    if strategy is None:
        strategy = ours()
    trainer = Trainer(max_steps=steps, strategy=strategy, callbacks=callbacks, **options)
    trainer.fit(Module(), loader, ckpt_path=path)
    return trainer
def native():
    return ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
def ours(**given):
    from flowstone.adapters.lightning import flowstone_strategy
    return flowstone_strategy(native(), **given)
def state_of(trainer):
    strategy = trainer.strategy
    return {"model": whole(strategy.lightning_module_state_dict()),
            "optimizer": whole(strategy.optimizer_state(trainer.optimizers[0])),
            "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict()}
"""
FABRIC = """
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
torch.manual_seed(7)
model = network()
if os.environ["RECIPE_RUN"].endswith("resumed"):
    for parameter in model.parameters():
        parameter.data.fill_(9)
parallelize, options = sharded, dict(accelerator="cpu", devices=RANKS)
"""
END = "\nprint('the end', flush=True)\nos._exit(0)\n"


def run(script: str, folder: Path, ranks: int, name: str = "run") -> list[str]:
    """What the ranks of a job said that has ended well."""
    codes = play(BEFORE + script + END, folder, name, store="sharded", ranks=ranks)
    outputs = [(folder / f"{name}-{rank}.txt").read_text() for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(outputs)[-4000:]
    assert all(text.rstrip().endswith("the end") for text in outputs)
    return outputs


def test_a_killed_trainer_resumes_bit_for_bit(tmp_path: Path) -> None:
    script = BEFORE + MODULE + SAMPLES["sharded"] + "\ntell(**state_of(trainer))"
    check_resumes(script, tmp_path, store="sharded", ranks=2)
    for path in (tmp_path / "killed" / "runs" / "sharded").iterdir():
        checkpoint = fs.open(path)
        assert checkpoint.verify().sound
        assert {"rank-00000.safetensors", "rank-00001.safetensors"} < {path.name for path in path.iterdir()}


def test_a_killed_fabric_loop_resumes_bit_for_bit(tmp_path: Path) -> None:
    script = BEFORE + FABRIC + SAMPLES["sharded-fabric"] + """
from torch.distributed.checkpoint.state_dict import get_state_dict
weights, moments = get_state_dict(model, optimizer)
fabric.strategy._flowstone.wait()
tell(model=whole(weights), optimizer=whole(moments), scheduler=scheduler)
"""
    check_resumes(script, tmp_path, store="sharded", ranks=2)


def test_other_layouts_load_the_same(tmp_path: Path) -> None:
    """And train on. What was read has been compared with what `fs.open` reads."""
    saving = SAMPLES["sharded"].replace(", GeneratorStates()]", "]")
    run(MODULE + saving + SAMPLES["sharded-reading"], tmp_path, 2, "saved")
    for ranks, tensor_parallel in ((1, 1), (3, 1), (2, 2)):
        run(MODULE + f"SIZES = {ranks // tensor_parallel}, {tensor_parallel}" + """
class Loaded(Callback):
    def on_train_start(self, trainer, module):
        found, stored = state_of(trainer), fs.open("runs/sharded/last.ckpt")
        assert trainer.global_step == 30
        compared = 0
        for name, value in found["model"].items():
            assert torch.equal(value, stored.read(f"state_dict.{name}")), name
        for name, slots in found["optimizer"]["state"].items():
            for slot, value in slots.items():
                assert torch.equal(value, stored.read(f"optimizer_0.state.{name}.{slot}")), name
                compared += 1
        assert compared == 24
        assert found["scheduler"]["milestones"] == {12: 1, 20: 1} and found["scheduler"]["last_epoch"] == 30
        print("loaded", flush=True)
order.begin = 0
Module.on_load_checkpoint = lambda self, checkpoint: None
from flowstone.adapters.lightning import flowstone_strategy
trainer = trained(32, [Loaded()], flowstone_strategy(ModelParallelStrategy(*SIZES)), path="runs/sharded/last.ckpt")
assert trainer.global_step == 32
""", tmp_path, ranks, f"on-{ranks}")
        assert "loaded" in (tmp_path / f"on-{ranks}-0.txt").read_text()


def test_a_layer_that_had_no_gradient_yet_has_no_slots_after_a_load(tmp_path: Path) -> None:
    """Neither those that torch makes for a new optimizer, nor stale ones where a run goes back."""
    run("""
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from flowstone.adapters.lightning import flowstone_strategy
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
    def forward(self, x, uses_b):
        return self.a(x) + self.b(x) if uses_b else self.a(x)
def parallelize(model, mesh):
    for part in (model.a, model.b, model):
        fully_shard(part, mesh=mesh["data_parallel"])
    return model
strategy = flowstone_strategy(ModelParallelStrategy(parallelize, data_parallel_size=RANKS, tensor_parallel_size=1))
fabric = Fabric(strategy=strategy, accelerator="cpu", devices=RANKS)
fabric.launch()
def trained(steps, uses_b, state=None):
    if state is None:
        model = fabric.setup_module(Late())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = {"model": model, "optimizer": fabric.setup_optimizers(optimizer)}
    for step in range(steps):
        x = torch.full((2, 6), 0.5 + step + fabric.global_rank)
        fabric.backward(state["model"](x, uses_b).square().mean())
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    return state
source = trained(2, False)
fabric.save("runs/sharded/late", source)
strategy._flowstone.wait()
expected = whole(list(get_state_dict(trained(2, True, source)["model"], source["optimizer"])))
assert {slots["step"].item() for slots in expected[1]["state"].values()} == {2.0, 4.0}
for steps in (0, 3):
    target = trained(steps, True)
    fabric.load("runs/sharded/late", target)
    trained(2, True, target)
    found = whole(list(get_state_dict(target["model"], target["optimizer"])))
    for name, value in expected[0].items():
        assert torch.equal(value, found[0][name]), (steps, name)
    assert expected[1]["state"].keys() == found[1]["state"].keys()
    for name, slots in expected[1]["state"].items():
        assert slots.keys() == found[1]["state"][name].keys()
        for slot, value in slots.items():
            assert torch.equal(value, found[1]["state"][name][slot]), (steps, name, slot)
""", tmp_path, 2)


def test_policies_keep_what_they_keep_without_flowstone(tmp_path: Path) -> None:
    run(MODULE + """
losses = [5.0, 3.0, 4.0, 3.0, 1.0, 2.0, 7.0, 0.5]
class Module(Module):
    def training_step(self, batch, index):
        self.log("loss", torch.tensor(losses[self.trainer.global_step]))
        return super().training_step(batch, index)
POLICIES = {
    "best": [dict(monitor="loss", save_top_k=2, every_n_train_steps=1, save_last=True)],
    "one": [dict(filename="best", monitor="loss", every_n_train_steps=1)],
    "newest": [dict(every_n_train_steps=2)],
    "link": [dict(every_n_train_steps=2, save_last="link")],
    "weights": [dict(every_n_train_steps=2, save_weights_only=True)],
    "two": [dict(monitor="loss", every_n_train_steps=2), dict(save_top_k=-1, every_n_train_steps=2)],
}
for name, policies in POLICIES.items():
    found = []
    for kind, strategy in (("native", native()), ("ours", ours())):
        folder = Path("policies", name, kind)
        callbacks = [ModelCheckpoint(folder, **policy) for policy in policies]
        order.begin = 0
        trained(6, callbacks, strategy)
        dist.barrier()
        best = [Path(one.best_model_path).name for one in callbacks]
        links = {one.name: os.readlink(one) for one in folder.iterdir() if one.is_symlink()}
        found.append((sorted(os.listdir(folder)), best, links))
        for path in folder.iterdir() if kind == "ours" else ():
            assert fs.open(path).verify().sound, path
    assert found[0] == found[1], (name, found)
""", tmp_path, 2)


def test_a_save_that_one_rank_cannot_write_is_raised_on_all(tmp_path: Path) -> None:
    """The first of them by the next save or by the end of fit; the checkpoint before stays, and nothing else."""
    run(MODULE + """
import pytest
class Refused(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3 and prelude.RANK == 1:
            trainer.strategy._flowstone.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
for steps, folder in ((4, Path("end")), (6, Path("next"))):
    order.begin = 0
    with pytest.raises(fs.SaveFailedError, match="step=4[\\\\s\\\\S]*rank 1"):
        trained(steps, [Refused(), ModelCheckpoint(folder, every_n_train_steps=2)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    assert [name for name in os.listdir(folder) if not name.startswith(".")] == ["epoch=0-step=2.ckpt"]
    assert fs.open(folder / "epoch=0-step=2.ckpt").verify().sound
""", tmp_path, 2)


def test_what_rank_0_cannot_store_ends_all_ranks(tmp_path: Path) -> None:
    run(MODULE + """
import pytest
class Module(Module):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"act": torch.relu})
expected = (fs.UnsupportedStateError, "hyper_parameters") if prelude.RANK == 0 else (fs.SaveFailedError, "rank 0")
with pytest.raises(expected[0], match=expected[1]):
    trained(4, [ModelCheckpoint("refused", every_n_train_steps=2)])
assert not Path("refused").exists() or not os.listdir("refused")
""", tmp_path, 2)


def test_what_lightning_has_saved_goes_on_through_flowstone(tmp_path: Path) -> None:
    """And can be removed by a policy. A checkpoint of weights alone is refused by name."""
    run(MODULE + """
import pytest
before = trained(4, [ModelCheckpoint("runs/mixed", every_n_train_steps=2)], native())
assert os.path.exists("runs/mixed/epoch=0-step=4.ckpt/meta.pt")
order.begin = 0
after = trained(6, [ModelCheckpoint("runs/mixed", every_n_train_steps=2)], path="runs/mixed/epoch=0-step=4.ckpt")
assert after.global_step == 6
assert set(os.listdir("runs/mixed")) == {"epoch=0-step=4.ckpt", "epoch=1-step=6.ckpt"}  # what was resumed from stays
dist.barrier()
after.strategy.remove_checkpoint("runs/mixed/epoch=0-step=4.ckpt")
after.strategy.teardown()
dist.barrier()
assert os.listdir("runs/mixed") == ["epoch=1-step=6.ckpt"]
assert fs.open("runs/mixed/epoch=1-step=6.ckpt").step == 6
strategy = ours(asynchronous=False)
class Durable(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 7:
            trainer.save_checkpoint("now.ckpt", weights_only=True)
            assert fs.open("now.ckpt").step == 7
Module.on_load_checkpoint = lambda self, checkpoint: None
trained(8, [Durable()], strategy, path="runs/mixed/epoch=1-step=6.ckpt")
with pytest.raises(fs.MismatchError, match="optimizer_0[\\\\s\\\\S]*with optimizers"):
    trained(9, [], path="now.ckpt")
with pytest.raises(fs.NoCheckpointError):
    trained(9, [], path="nowhere.ckpt")
""", tmp_path, 2)


def test_wrong_calls_are_refused_by_name(tmp_path: Path) -> None:
    for wrong in ("fsdp", DDPStrategy(), None):
        with pytest.raises(fs.ArgumentError, match=r"not a sharded strategy[\s\S]*ModelParallelStrategy"):
            flowstone_strategy(wrong)
    with pytest.raises(fs.ArgumentError, match=r"state_dict_type='full'[\s\S]*state_dict_type='sharded'"):
        flowstone_strategy(FSDPStrategy())
    with pytest.raises(fs.ArgumentError, match="save_distributed_checkpoint=False"):
        flowstone_strategy(ModelParallelStrategy(save_distributed_checkpoint=False))
    with pytest.raises(fs.ArgumentError, match="EngineOptions"):
        flowstone_strategy(ModelParallelStrategy(), engine="fast")  # type: ignore[arg-type]
    strategy = ModelParallelStrategy()
    assert flowstone_strategy(strategy) is strategy
    assert isinstance(strategy, ModelParallelStrategy)
    assert type(flowstone_strategy(strategy)) is type(strategy), "twice is once"
    with pytest.raises(fs.ArgumentError, match="storage_options"):
        strategy.save_checkpoint({"state_dict": {}}, tmp_path / "x.ckpt", storage_options={"a": 1})
    with pytest.raises(fs.ArgumentError, match="s3://bucket/x"):
        strategy.load_checkpoint("s3://bucket/x")
    strategy.checkpoint_io = FlowstoneIO()
    with pytest.raises(fs.ArgumentError, match="leave FlowstoneIO out"):
        GeneratorStates().setup(Namespace(strategy=strategy), None, "fit")
    fabric = flowstone_strategy(FabricModelParallel(lambda model, mesh: model))
    with pytest.raises(fs.ArgumentError, match="filter"):
        fabric.save_checkpoint(tmp_path / "x", {}, filter={"a": lambda name, value: True})
    with pytest.raises(fs.ArgumentError, match="the state has 0"):
        fabric.save_checkpoint(tmp_path / "x", {"step": 3})
    flowstone_strategy(FSDPStrategy(state_dict_type="sharded"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's FullyShardedDataParallel needs a GPU")
def test_fsdp_resumes_what_it_saved(tmp_path: Path) -> None:
    run(MODULE + """
from flowstone.adapters.lightning import flowstone_strategy
os.environ.pop("CUDA_VISIBLE_DEVICES")
options |= dict(accelerator="gpu", devices=1)
del Module.configure_model, lightning_sharded.Module.configure_model
def fsdp():
    return flowstone_strategy(FSDPStrategy(state_dict_type="sharded"))
first = trained(6, [ModelCheckpoint("runs/fsdp", every_n_train_steps=2, save_last=True)], fsdp())
class Loaded(Callback):
    def on_train_start(self, trainer, module):
        stored = fs.open("runs/fsdp/last.ckpt")
        with torch.no_grad():
            for name, value in trainer.strategy.lightning_module_state_dict().items():
                value = value.full_tensor() if hasattr(value, "full_tensor") else value.local_tensor()
                assert torch.equal(value.cpu().view(-1), stored.read(f"state_dict.{name}").view(-1)), name
trained(8, [Loaded()], fsdp(), path="runs/fsdp/last.ckpt")
""", tmp_path, 1)
