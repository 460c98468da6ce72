"""The model's documents that a Trainer's or an Accelerator's run keeps: `from_pretrained` loads an export."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_ranks

import flowstone as fs

transformers = pytest.importorskip("transformers", reason="`make test-integrations` installs it")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from trainer_act import made_trainer, small_gpt, with_adapters  # noqa: E402

from flowstone.adapters.huggingface import use_flowstone  # noqa: E402
from flowstone.adapters.huggingface.documents import ModelDocuments  # noqa: E402

ACT = str(Path(__file__).with_name("trainer_act.py"))
TOKENS = torch.arange(8).view(1, 8)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    yield
    for item in (AcceleratorState, GradientState, PartialState):
        item._reset_state()


def tokenizer(words: int = 20_000) -> Any:
    """Its tokenizer.json has more than 64 KiB."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0, **{f"word{number}": number + 1 for number in range(words)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
    fast.chat_template = "{{ messages[0].content }}"
    return fast


def trained(out: Path, model: Any = None, processing: Any = None, steps: int = 10, **given: Any) -> Any:
    trainer = made_trainer(out, [], model, max_steps=steps, **given)
    trainer.processing_class = processing
    use_flowstone(trainer).train()
    return trainer


def loaded(directory: Path) -> Any:
    module, loading_info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    return module.eval()


def same_logits(value: Any, other: Any) -> bool:
    with torch.no_grad():
        return torch.equal(value.eval()(TOKENS).logits, other.eval()(TOKENS).logits)


def test_an_export_of_a_run_is_what_from_pretrained_loads(tmp_path: Path) -> None:
    words = tokenizer()
    trainer = trained(tmp_path / "run", processing=words)
    command = [sys.executable, "-m", "flowstone", "export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]
    subprocess.run(command, check=True, timeout=120)
    assert (tmp_path / "hf" / "tokenizer.json").stat().st_size > 64 << 10
    assert same_logits(loaded(tmp_path / "hf"), trainer.model)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert other("word7 word19999 no").input_ids == words("word7 word19999 no").input_ids == [8, 20000, 0]
    assert other.chat_template == words.chat_template
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["dtype"] == "float32"
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == 2


def test_it_writes_what_save_model_writes_but_for_arguments(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run", processing=tokenizer(10))
    trainer.save_model(str(tmp_path / "own"))
    fs.export(tmp_path / "run", tmp_path / "hf")
    own, ours = ({path.name for path in (tmp_path / name).iterdir()} for name in ("own", "hf"))
    assert own - ours == {"training_args.bin"}
    assert ours <= own
    for name in ours - {"model.safetensors"}:
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "own" / name).read_bytes(), name


def test_every_step_has_them_the_best_one_too(tmp_path: Path) -> None:
    scores = {"eval_strategy": "steps", "eval_steps": 5, "metric_for_best_model": "loss", "save_total_limit": 2}
    trainer = trained(tmp_path / "run", steps=20, load_best_model_at_end=True, **scores)
    for step in [int(path.name.removeprefix("step-")) for path in (tmp_path / "run").glob("step-*")]:
        fs.export(tmp_path / "run", tmp_path / f"hf-{step}", step=step)
        assert loaded(tmp_path / f"hf-{step}") is not None
    assert same_logits(loaded(tmp_path / f"hf-{trainer.state.best_global_step}"), trainer.model)


def test_only_the_weights_are_saved_and_they_are_there(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run", save_only_model=True)
    fs.export(tmp_path / "run", tmp_path / "hf")
    assert same_logits(loaded(tmp_path / "hf"), trainer.model)


def test_two_ranks_save_and_one_goes_on(tmp_path: Path) -> None:
    record = {"out": str(tmp_path / "out"), "args": {"max_steps": 10}}
    assert run_ranks([ACT, json.dumps(record)], tmp_path / "two", 2) == [0, 0], (tmp_path / "two-0.txt").read_text()
    fs.export(tmp_path / "out", tmp_path / "two")
    assert loaded(tmp_path / "two") is not None
    record["args"] = {"max_steps": 15}
    assert run_ranks([ACT, json.dumps({**record, "resume": "last"})], tmp_path / "one") == [0]
    assert fs.open(tmp_path / "out").step == 15
    assert fs.open(tmp_path / "out").verify().sound
    fs.export(tmp_path / "out", tmp_path / "one")
    assert loaded(tmp_path / "one") is not None


def test_a_checkpoint_without_them_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(ModelDocuments, "sections", lambda *_, **__: {})
        trained(tmp_path / "run", steps=5)
    assert "huggingface" not in fs.open(tmp_path / "run").contents.per_rank
    fs.export(tmp_path / "run", tmp_path / "before")
    assert [path.name for path in (tmp_path / "before").iterdir()] == ["model.safetensors"]
    trainer = use_flowstone(made_trainer(tmp_path / "run", [], max_steps=10))
    trainer.train(resume_from_checkpoint=True)
    fs.export(tmp_path / "run", tmp_path / "hf")
    assert same_logits(loaded(tmp_path / "hf"), trainer.model)
    assert not fs.diff(tmp_path / "run", tmp_path / "run", step_a=5, step_b=10).equal


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 1)
        self.config = transformers.GPT2Config()

    def forward(self, input_ids: torch.Tensor, labels: object = None) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(input_ids.float()).mean()}


def test_a_module_that_from_pretrained_cannot_load_has_none(tmp_path: Path) -> None:
    trained(tmp_path / "run", Plain(), tokenizer(10), steps=5)
    assert set(fs.open(tmp_path / "run").contents.per_rank) == {"rng", "trainer_state"}


def test_adapters_have_none(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="`make test-integrations` installs it")
    trained(tmp_path / "run", with_adapters(), tokenizer(10), steps=5)
    assert "huggingface" not in fs.open(tmp_path / "run").contents.per_rank


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [row.getMessage() for row in caplog.records if row.name == "flowstone" and row.levelno >= logging.WARNING]


class Broken:
    """A processor without a way to be written, when it is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def save_pretrained(self, directory: str) -> None:
        self.asked += 1
        Path(directory, "tokenizer.json").write_text("half of")
        raise RuntimeError("no space for words")


def test_a_tokenizer_that_cannot_be_written_is_told_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    trainer = trained(tmp_path / "run", processing=broken)
    assert trainer.state.global_step == 10
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000005", "step-00000010"]
    assert broken.asked == 1
    warnings = [warning for warning in warnings_of(caplog) if "no space for words" in warning]
    assert len(warnings) == 1
    assert "--documents" in warnings[0]
    fs.export(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    assert same_logits(loaded(tmp_path / "hf"), trainer.model)


def test_a_generation_configuration_that_is_refused_takes_no_other_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_gpt()
    model.generation_config.temperature = 0.5  # without do_sample, which save_pretrained refuses
    trainer = trained(tmp_path / "run", model, steps=5)
    assert [warning for warning in warnings_of(caplog) if "generation configuration" in warning]
    fs.export(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf" / "generation_config.json").exists()
    assert same_logits(loaded(tmp_path / "hf"), trainer.model)


class Hostile:
    def __init__(self, elsewhere: Path) -> None:
        self.elsewhere = elsewhere

    def save_pretrained(self, directory: str) -> None:
        held = Path(directory)
        self.elsewhere.write_text("not a configuration or tokenizer file")
        for name in (".hidden.json", "a\nb.json", "model.safetensors", "pytorch_model.bin", "config.json", "run.py"):
            (held / name).write_text("{}")
        (held / "link.json").symlink_to(self.elsewhere)
        (held / "below").mkdir()
        (held / "below" / "deep.json").write_text("{}")
        (held / "directory.json").mkdir()
        os.mkfifo(held / "pipe.json")
        (held / "vocab.txt").write_text("a\n")


def test_of_what_a_processor_writes_only_documents_are_kept(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run", processing=Hostile(tmp_path / "elsewhere.json"), steps=5)
    kept = fs.open(tmp_path / "run").state_dict("huggingface", rank=0)
    assert set(kept) == {"config.json", "generation_config.json", "vocab.txt"}
    fs.export(tmp_path / "run", tmp_path / "hf")
    assert same_logits(loaded(tmp_path / "hf"), trainer.model)


class Long:
    def __init__(self, length: int) -> None:
        self.length = length

    def save_pretrained(self, directory: str) -> None:
        with Path(directory, "tokenizer.json").open("wb") as file:
            file.truncate(self.length)


@pytest.mark.parametrize(
    ("length", "left"), [(64 << 20, set()), ((64 << 20) + 1, {"config.json", "generation_config.json"})],
    ids=["together", "one by itself"],
)
def test_documents_that_are_too_long_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int, left: set[str]
) -> None:
    trained(tmp_path / "run", processing=Long(length), steps=5)
    (kept,) = fs.open(tmp_path / "run").contents.per_rank["huggingface"]
    assert set(kept) == left  # type: ignore[call-overload]
    assert len([warning for warning in warnings_of(caplog) if "more than 67108864 bytes" in warning]) == 1
    fs.export(tmp_path / "run", tmp_path / "hf")


def test_an_accelerators_model_has_its_configuration(tmp_path: Path) -> None:
    accelerator = use_flowstone(Accelerator(cpu=True))
    model = accelerator.prepare(small_gpt())
    accelerator.save_state(str(tmp_path / "run" / "step_1"))
    accelerator.load_state(str(tmp_path / "run" / "step_1"))
    accelerator.end_training()
    fs.export(tmp_path / "run", tmp_path / "hf")
    assert same_logits(loaded(tmp_path / "hf"), accelerator.unwrap_model(model))


def test_a_model_of_experts_is_loaded_as_it_is_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=3,
    ))
    trainer = trained(tmp_path / "run", model, steps=5)
    fs.export(tmp_path / "run", tmp_path / "hf")
    assert same_logits(loaded(tmp_path / "hf"), trainer.model)
