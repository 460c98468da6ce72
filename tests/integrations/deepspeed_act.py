"""One rank of a job that DeepSpeed trains: `deepspeed_act.py ACT STAGE TYPE DIRECTORY [slot]`.

whole, resumed   load what there is, train to the end through Flowstone, and tell what came out
killed           the same, and die of SIGKILL on the way, with a save in flight
native           train half of the way, and let DeepSpeed save; tell each parameter's state as DeepSpeed gathers it
lost             save under tags that the system refuses, one after the other, and end without a wait for the second
verbs            what a job can do besides, and what is refused
slots            the same of an engine that has `datastates_ckpt`
other-ranks      load what another number of ranks has saved, and the model alone

With `slot`, it is DeepSpeed's setting `datastates_ckpt` that leads to Flowstone, and not `attach`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from digests import digest

import flowstone as fs
from flowstone.adapters.deepspeed import attach, fill_datastates_slot

WIDTH, STEPS = 160, 6
SLOT = sys.argv[5:] == ["slot"]


class Network(torch.nn.Module):
    """With a large buffer that the forward changes: a copy of it that is taken late would not be of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.last = torch.nn.Linear(WIDTH, 5)
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(torch.relu(self.norm(self.first(x))))


def engine_of(stage: int, kind: str) -> Any:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = Network()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    if kind == "bf16":
        config["bf16"] = {"enabled": True}
    if SLOT:
        config["datastates_ckpt"] = {"host_cache_size": 0.25, "parser_threads": 2}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, until: int, directory: Path | None, kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    while engine.global_steps < until:
        noise = torch.Generator().manual_seed(100 * engine.global_steps + engine.global_rank)
        loss = engine(torch.randn(4, WIDTH, generator=noise).to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        if directory is not None:
            engine.save_checkpoint(str(directory), client_state={"seen": [engine.global_steps]})


def weights(engine: Any) -> list[str]:
    """Of the whole weights, of stage 3 alone; all ranks call this."""
    parameters = list(engine.module.parameters())
    if engine.zero_optimization_stage() < 3:
        return []
    with deepspeed.zero.GatheredParameters(parameters):
        return [digest(parameter) for parameter in parameters]


def tell(engine: Any, act: str, directory: Path) -> None:
    parts = [engine.optimizer.state_dict(), engine.module.state_dict(), engine.lr_scheduler.state_dict()]
    record = {"parts": [digest(part) for part in parts], "step": engine.global_steps, "weights": weights(engine)}
    Path(f"{directory}-{act}-{engine.global_rank}.json").write_text(json.dumps(record))


def wait(engine: Any) -> None:
    """Until all saves are durable."""
    if SLOT:
        engine.checkpoint_engine.ckpt_engine.wait(persist=True)
    else:
        engine.checkpoint_engine.wait()


def resumed(act: str, stage: int, kind: str, directory: Path) -> None:
    if SLOT:
        fill_datastates_slot()
    engine = engine_of(stage, kind)
    if not SLOT:
        attach(engine)
    _, client = engine.load_checkpoint(str(directory))
    assert client is None or client["seen"] == [engine.global_steps]
    if act == "killed":
        train(engine, 2, directory, kind)
        wait(engine)
        assert engine.global_rank or (directory / "latest").read_text() == "global_step2"
        train(engine, 4, directory, kind)
        os.kill(os.getpid(), signal.SIGKILL)
    print("from", engine.global_steps, flush=True)
    train(engine, STEPS, directory, kind)
    wait(engine)
    tell(engine, act, directory)


def other_ranks(stage: int, kind: str, directory: Path) -> None:
    """Everything, and then, of an engine of its own, parameters alone."""
    engine = engine_of(stage, kind)
    attach(engine)
    record = json.loads(Path(f"{directory}-whole-0.json").read_text())
    engine.load_checkpoint(str(directory))
    assert engine.global_steps == STEPS
    assert digest(engine.lr_scheduler.state_dict()) == record["parts"][2]
    check_weights(engine, record)
    if stage:
        engine = engine_of(stage, kind)
        attach(engine)
        given = {"load_optimizer_states": False} if stage == 3 else {"load_module_only": True}
        engine.load_checkpoint(str(directory), **given)
        check_weights(engine, record)
    print("the end", flush=True)


def check_weights(engine: Any, record: dict[str, Any]) -> None:
    if engine.zero_optimization_stage() == 3:
        assert weights(engine) == record["weights"]
        assert len(record["weights"]) == 6
    else:
        assert digest(engine.module.state_dict()) == record["parts"][1]


def native(stage: int, kind: str, directory: Path) -> None:
    engine = engine_of(stage, kind)
    train(engine, 3, None, kind)
    engine.save_checkpoint(str(directory), client_state={"seen": [3]})
    gathered: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters() if stage else ():
        gathered[f"master.{name}"] = safe_get_full_fp32_param(parameter).clone()
        for slot in ("exp_avg", "exp_avg_sq"):
            result = safe_get_full_optimizer_state(parameter, slot).clone()
            gathered[f"optimizer.state.model.{name}.{slot}"] = result
    if engine.global_rank == 0:
        torch.save(gathered, f"{directory}-gathered.pt")


def lost(stage: int, kind: str, directory: Path) -> None:
    engine = engine_of(stage, kind)
    plugin = attach(engine)
    other = directory.with_name("other")
    other.mkdir()
    directory.mkdir()
    os.chdir(directory)
    train(engine, 1, None, kind)
    engine.save_checkpoint(".", tag="tagged")
    os.chdir(other)  # before the commit
    plugin.wait()
    assert (directory / "latest").read_text() == "tagged"
    assert not list(other.iterdir())
    (directory / "taken" / ".mp_rank_00_model_states.pt.flowstone-draft").mkdir(parents=True)
    train(engine, 2, None, kind)
    engine.save_checkpoint(str(directory), tag="taken")
    with pytest.raises(fs.SaveFailedError, match="step 2 is committed"):
        plugin.wait()
    assert (directory / "latest").read_text() == "tagged"
    plugin.wait()
    train(engine, 3, None, kind)
    engine.save_checkpoint(str(directory), tag="taken")
    child = os.fork()
    if not child:
        plugin.cleanup()  # of its parent: nothing to wait for
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    globals()["engine"] = engine  # as a script has it until it ends
    sys.exit()


def watched_rewind(directory: Path) -> list[str]:
    """What `latest` names each time that a Checkpointer sets steps aside."""
    seen, rewind = [], fs.Checkpointer.rewind

    def watched(checkpointer: fs.Checkpointer, step: int) -> object:
        seen.append((directory / "latest").read_text())
        return rewind(checkpointer, step)

    fs.Checkpointer.rewind = watched  # type: ignore[method-assign, assignment]
    return seen


def verbs(stage: int, kind: str, directory: Path) -> None:
    engine = engine_of(stage, kind)
    plugin = attach(engine, keep=fs.Keep(last=3))
    with pytest.raises(fs.ArgumentError, match="already"):
        attach(engine)
    with pytest.raises(fs.ArgumentError, match="must be a DeepSpeed engine"):
        attach(torch.nn.Linear(3, 3))
    assert engine.load_checkpoint(str(directory)) == (None, None)
    train(engine, 1, None, kind)
    with pytest.raises(fs.UnsupportedStateError, match=r"client_thing[\s\S]*next"):
        engine.save_checkpoint(str(directory), client_state={"client_thing": object()})
    engine.save_checkpoint(str(directory), tag="first", client_state={"best": torch.ones(3), "when": (1, {2: "x"})})
    with pytest.raises(fs.StepExistsError):
        engine.save_checkpoint(str(directory), tag="again")
    train(engine, 5, directory, kind)
    plugin.wait()
    names = {path.name for path in directory.glob("step-*")}
    assert {f"step-0000000{step}" for step in (3, 4, 5)} <= names  # what retention gave up may be there for a moment
    assert "step-00000001" not in names
    before = digest([engine.optimizer.state_dict(), engine.module.state_dict()])
    engine.load_checkpoint(str(directory), tag="global_step3")
    assert engine.global_steps == 3
    latest_at_rewind = watched_rewind(directory)
    train(engine, 5, directory, kind)  # what was saved after step 3 is set aside
    plugin.wait()
    assert latest_at_rewind == ["global_step3"]
    assert digest([engine.optimizer.state_dict(), engine.module.state_dict()]) == before
    with pytest.raises(fs.NoCheckpointError):
        engine.load_checkpoint(str(directory), tag="first")
    engine.save_16bit_model(str(directory), "weights.bin")
    assert torch.load(directory / "weights.bin", weights_only=True)["first.weight"].shape == (WIDTH, WIDTH)
    checkpoint = fs.open(directory)
    assert checkpoint.verify().sound
    assert checkpoint.objects["deepspeed"]["tag"] == "global_step5"
    assert any(name.endswith("first.weight") for name in checkpoint.tensors)
    for path in directory.rglob("*"):
        if path.is_file() and path.name != "weights.bin":
            assert not path.read_bytes().startswith((b"PK\x03\x04", b"\x80\x02")), f"{path} is a pickle"
    with next(path for path in directory.glob("step-00000005/rank-*")).open("r+b") as opened:
        opened.seek(-70_000, os.SEEK_END)
        opened.write(b"damage" * 100)
    with pytest.raises(fs.DamagedError):
        engine.load_checkpoint(str(directory), tag="global_step5")


def slots(stage: int, kind: str, directory: Path) -> None:
    from deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine import DataStatesCheckpointEngine

    from flowstone.adapters.deepspeed.slot import CheckpointEngine

    sys.path.insert(0, str(directory))
    (directory / "datastates").mkdir(parents=True)
    (directory / "datastates" / "__init__.py").write_text("")
    with pytest.raises(fs.ArgumentError, match=r"datastates/__init__\.py"):
        fill_datastates_slot()  # which would hide it
    sys.path.remove(str(directory))
    fill_datastates_slot(keep=1)
    fill_datastates_slot(keep=fs.Keep(last=2))
    engine = engine_of(stage, kind)
    assert type(engine.checkpoint_engine) is DataStatesCheckpointEngine
    own = engine.checkpoint_engine.ckpt_engine
    assert (type(own), own.rank, own.budget_bytes) == (CheckpointEngine, 0, 1 << 28)
    with pytest.raises(fs.ArgumentError, match="already"):
        attach(engine)
    own.wait(persist=True)  # of nothing
    train(engine, 1, directory / "run", kind)
    own.wait()
    train(engine, 4, directory / "run", kind)
    assert own.commit()
    assert (directory / "run" / "latest").read_text() == "global_step4"
    names = {path.name for path in (directory / "run").glob("step-*")}
    assert names >= {"step-00000003", "step-00000004"}
    assert "step-00000001" not in names  # and that step 2 is gone soon, other tests show
    saved = digest([engine.optimizer.state_dict(), engine.module.state_dict()])
    engine.save_16bit_model(str(directory), "weights.bin")
    assert torch.load(directory / "weights.bin", weights_only=True)["first.weight"].shape == (WIDTH, WIDTH)
    train(engine, 5, None, kind)
    engine.load_checkpoint(str(directory / "run"))
    assert digest([engine.optimizer.state_dict(), engine.module.state_dict()]) == saved
    with pytest.raises(fs.ArgumentError, match="not attached to a DeepSpeed engine"):
        CheckpointEngine(engine._config, 0).save({}, str(directory / "x.pt"))
    engine._config.datastates_config.config = {"host_cache": 3}
    with pytest.raises(fs.ArgumentError, match="host_cache 3"):
        CheckpointEngine(engine._config, 0)
    train(engine, 5, None, kind)
    engine.save_checkpoint(str(directory / "run"))
    engine.destroy()  # which waits
    assert fs.open(directory / "run").step == 5
    assert (directory / "run" / "latest").read_text() == "global_step5"
    sys.argv.pop()
    globals()["SLOT"] = False
    assert not hasattr(engine_of(stage, kind).save_checkpoint, "of_deepspeed")
    print("the end", flush=True)


if __name__ == "__main__":
    act, stage, kind, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    match act:
        case "native":
            native(stage, kind, directory)
        case "lost":
            lost(stage, kind, directory)
        case "verbs":
            verbs(stage, kind, directory)
        case "slots":
            slots(stage, kind, directory)
        case "other-ranks":
            other_ranks(stage, kind, directory)
        case _:
            resumed(act, stage, kind, directory)
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process
