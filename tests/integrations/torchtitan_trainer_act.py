"""One rank of a job that torchtitan's own Trainer trains, on the CPU: `torchtitan_trainer_act.py ACT MODE DIRECTORY`.

whole, resumed   train to the end, from the newest checkpoint if there is one, and tell what came out
killed           the same, and die of SIGKILL on the way, with a save in flight where the mode has such

torchtitan asks its accelerator for its name and its memory; `Processor` answers for the CPU, which torch.cpu does not.
Everything else is torchtitan's: its Llama (two layers of its debug model), FSDP2, optimizers, schedules, loop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan
from digests import digest
from torch.distributed.fsdp import FSDPModule

STEPS, LENGTH, WORDS = 8, 32, 2048


class Processor:
    """What torchtitan takes from the module of a device."""

    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = synchronize = empty_cache = reset_peak_memory_stats = staticmethod(lambda *given: None)
    get_device_name = staticmethod(lambda device: "cpu")
    get_device_properties = staticmethod(lambda device: SimpleNamespace(total_memory=1 << 30))
    memory_stats = staticmethod(lambda device: {})


titan.device_type, titan.device_module = "cpu", Processor  # before what is imported next looks there
if not hasattr(dist, "set_timeout"):  # torchtitan 0.3.0 calls it as torch does after 2.13
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from flowstone.adapters.torchtitan import FlowstoneCheckpointManager as CheckpointManager  # noqa: E402


class Text(torch.utils.data.IterableDataset[Any]):
    """Random words, other ones on each rank; it knows its place."""

    def __init__(self, rank: int) -> None:
        self.at, self.rank = 0, rank

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            words = torch.randint(WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(self.at + self.rank))
            self.at += 1000
            yield {"input": words[:-1]}, words[1:]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **rest: Any) -> None:
        super().__init__(Text(dp_rank), dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **rest: Any) -> None:
        super().__init__()

    def encode(self, *given: Any, **more: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *given: Any, **more: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return WORDS


class Killed(Trainer):
    """Dies before its fifth step, once there is something to resume from."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator: Any) -> None:
        if self.step == 5:
            while not Path(self.config.dump_folder, "checkpoint", "step-2", "manifest.json").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        super().train_step(data_iterator)


def config_of(act: str, mode: str, directory: Path) -> Any:
    """Of a user; the import above is the line that is changed."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others are for GPUs
    return (Killed if act == "killed" else Trainer).Config(
        model_spec=spec, dump_folder=str(directory), tokenizer=NoTokenizer.Config(), dataloader=Loader.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS), optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2, seq_len=LENGTH, steps=STEPS, disable_cuda_graphs=True, mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # the default one needs a later torch
        debug=DebugConfig(seed=7, deterministic=True, enable_structured_logging=False),
        checkpoint=CheckpointManager.Config(enable=True, interval=1, async_mode=mode, keep_latest_k=0,
                                            last_save_model_only=False),
    )


def main(act: str, mode: str, directory: Path) -> None:
    trainer = config_of(act, mode, directory).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing on its way
    rank, begun = int(os.environ["RANK"]), []
    trainer.gc_handler.run = lambda step: begun.append(step)  # the first is the one behind what was loaded
    trainer.train()
    parts = {
        name: digest({key: part.full_tensor() if hasattr(part, "full_tensor") else part for key, part in state.items()})
        for name, state in (
            ("model", trainer.model_parts[0].state_dict()), ("optimizer", trainer.optimizers.state_dict()),
            ("schedule", trainer.lr_schedulers.state_dict()), ("trainer", trainer.state_dict()),
        )
    }
    trainer.close()
    Path(f"{directory}-{act}-{rank}.json").write_text(json.dumps({"parts": parts, "begun": begun[0] - 1}))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process
