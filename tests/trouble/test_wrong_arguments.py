"""Wrong arguments: each public verb names the mistake and the accepted values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flowstone as fs
from flowstone.store.memory.node_memory import NodeMemory

WRONG: dict[str, object] = {
    "none": None, "int": 7, "bytes": b"abc", "list": [1], "object": object(), "class": dict, "bool": True,
    "tensor": torch.ones(2), "dict": {"a": 1}, "nul": "a\0b", "surrogate": "\udcff",
}
Verb = Callable[[Path, Any], object]

PATHS: dict[str, Verb] = {
    "open": lambda run, wrong: fs.open(wrong),
    "export from": lambda run, wrong: fs.export(wrong, run.parent / "out"),
    "export to": lambda run, wrong: fs.export(run, wrong),
    "import from": lambda run, wrong: fs.import_checkpoint(wrong, run.parent / "out"),
    "import to": lambda run, wrong: fs.import_checkpoint(run, wrong),
    "pack from": lambda run, wrong: fs.pack(wrong, run.parent / "out"),
    "pack to": lambda run, wrong: fs.pack(run, wrong),
    "diff": lambda run, wrong: fs.diff(run, wrong),
    "read_rules": lambda run, wrong: fs.read_rules(wrong),
    "Checkpointer": lambda run, wrong: fs.Checkpointer(wrong),
}
OTHERS: dict[str, tuple[Verb, tuple[str, ...]]] = {  # and what each accepts of these
    "export documents": (lambda run, wrong: fs.export(run, run.parent / "out", documents=wrong), ("none",)),
    "export dtype": (lambda run, wrong: fs.export(run, run.parent / "out", dtype=wrong), ("none",)),
    "export section": (lambda run, wrong: fs.export(run, run.parent / "out", section=wrong), ("none",)),
    "export budget": (lambda run, wrong: fs.export(run, run.parent / "out", budget_bytes=wrong), ()),
    "export shards": (lambda run, wrong: fs.export(run, run.parent / "out", shard_bytes=wrong), ("int",)),
    "export cluster": (lambda run, wrong: fs.export(run, run.parent / "out", cluster=wrong), ("none",)),
    "export progress": (lambda run, wrong: fs.export(run, run.parent / "out", on_progress=wrong), ("none", "class")),
    "import section": (lambda run, wrong: fs.import_checkpoint(run, run.parent / "out", section=wrong), ("surrogate",)),
    "import budget": (lambda run, wrong: fs.import_checkpoint(run, run.parent / "out", budget_bytes=wrong), ()),
    "pack budget": (lambda run, wrong: fs.pack(run, run.parent / "out", budget_bytes=wrong), ()),
    "diff section": (lambda run, wrong: fs.diff(run, run, section=wrong), ("none", "nul", "surrogate")),
    "diff names": (lambda run, wrong: fs.diff(run, run, names=wrong), ()),
    "diff skip": (lambda run, wrong: fs.diff(run, run, skip=wrong), ("nul", "surrogate")),
    "diff budget": (lambda run, wrong: fs.diff(run, run, budget_bytes=wrong), ()),
    "ready_rules": (lambda run, wrong: fs.ready_rules(wrong), ()),
    "read": (lambda run, wrong: fs.open(run).read(wrong), ()),
    "stream names": (lambda run, wrong: fs.open(run).stream(wrong), ("none",)),
    "stream device": (lambda run, wrong: fs.open(run).stream(device=wrong), ()),
    "stream regions": (lambda run, wrong: fs.open(run).stream(regions=wrong), ("none",)),
    "verify cluster": (lambda run, wrong: fs.open(run).verify(cluster=wrong), ("none",)),
    "verify progress": (lambda run, wrong: fs.open(run).verify(wrong), ("none", "class")),
    "bits": (lambda run, wrong: fs.Quantize("a", bits=wrong), ()),
    "run in memory": (lambda run, wrong: NodeMemory(wrong), ()),
    "rules of saves": (lambda run, wrong: fs.Checkpointer(run, rules=wrong), ()),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.ones(3)}})
    return tmp_path / "run"


def check(verb: Verb, run: Path, wrong: object) -> None:
    before = sorted(run.parent.rglob("*"))
    with pytest.raises(fs.FlowstoneError) as caught:
        verb(run, wrong)
    assert caught.value.facts["next"]
    assert sorted(run.parent.rglob("*")) == before


@pytest.mark.parametrize("verb", PATHS.values(), ids=PATHS.keys())
def test_what_is_no_path_is_refused(saved: Path, verb: Verb) -> None:
    for wrong in WRONG.values():
        check(verb, saved, wrong)


@pytest.mark.parametrize(("verb", "accepts"), OTHERS.values(), ids=OTHERS.keys())
def test_what_is_of_a_wrong_type_is_refused(saved: Path, verb: Verb, accepts: tuple[str, ...]) -> None:
    for kind, wrong in WRONG.items():
        if kind not in accepts:
            check(verb, saved, wrong)


def test_a_file_in_the_place_of_a_directory_is_refused(saved: Path) -> None:
    file = saved.parent / "file"
    file.write_text("x")
    for act in (
        lambda: fs.open(file), lambda: fs.export(saved, file), lambda: fs.pack(saved, file),
        lambda: fs.import_checkpoint(saved, file), lambda: fs.export(saved, saved.parent / "out", documents=file),
        lambda: fs.read_rules(saved), lambda: fs.read_rules(saved / "nothing"),
    ):
        with pytest.raises(fs.FlowstoneError) as caught:
            act()
        assert caught.value.facts["next"]
    assert file.read_text() == "x"
