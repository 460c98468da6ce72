"""Adding a kind of values: one file, and one line in the table."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flowstone as fs
from flowstone.state import registry

LIBRARY = """
class Ring:
    \"\"\"What some library keeps values in: a fixed number of slots, and where the next one goes.\"\"\"

    def __init__(self, slots, at=0):
        self.slots, self.at = list(slots), at
"""

KIND = """
from flowstone.state.kind import ValueKind
from flowstone.state.nodes import describe_node
from flowstone.state.records import MISSING, RestorePhase

from library_of_rings import Ring


class Rings(ValueKind):
    types = frozenset({Ring})
    nests = True

    def find(self, value, place, scan):
        for i, item in enumerate(value.slots):
            scan.walk(item, place.child(i))
        return True

    def describe(self, value, place, saving, role):
        slots = [saving.walk(item, place.child(i)) for i, item in enumerate(value.slots)]
        return {"slots": slots, "at": value.at}

    def restore(self, value, node, place, loading):
        if not isinstance(node, dict) or len(node["slots"]) != len(value.slots):
            expected = f"a ring of {len(value.slots)} slots"
            found = "nothing of that name" if node is MISSING else describe_node(node)
            loading.add_difference("missing" if node is MISSING else "kind", place.name, expected, found)
            return None
        for i, (item, stored) in enumerate(zip(value.slots, node["slots"])):
            replacement = loading.walk(item, place.child(i), stored)
            if replacement is not None:
                loading.defer(RestorePhase.VALUES, lambda i=i, make=replacement: value.slots.__setitem__(i, make()))
        loading.defer(RestorePhase.VALUES, lambda: setattr(value, "at", node["at"]))
        return None
"""


def _imported(name: str, text: str, folder: Path) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def library(tmp_path: Path) -> Iterator[ModuleType]:
    yield _imported("library_of_rings", LIBRARY, tmp_path)
    sys.modules.pop("library_of_rings")


@pytest.fixture
def kind(library: ModuleType, tmp_path: Path) -> Iterator[registry.ValueKind]:
    """The one file."""
    yield _imported("kind_of_rings", KIND, tmp_path).Rings()
    sys.modules.pop("kind_of_rings")


def _ring(library: ModuleType, seed: int) -> object:
    torch.manual_seed(seed)
    slots = [torch.rand(5), seed, torch.nn.Linear(3, 2), {"beta": 0.1 * seed, "mean": torch.rand(2)}, [torch.rand(1)]]
    return library.Ring(slots, at=seed % 5)


def _same(value: object, other: object) -> bool:
    mine, theirs = value.slots, other.slots  # type: ignore[attr-defined]
    return (
        torch.equal(mine[0], theirs[0]) and mine[1] == theirs[1] and torch.equal(mine[2].weight, theirs[2].weight)
        and mine[3]["beta"] == theirs[3]["beta"] and torch.equal(mine[3]["mean"], theirs[3]["mean"])
        and torch.equal(mine[4][0], theirs[4][0]) and value.at == other.at  # type: ignore[attr-defined]
    )


def test_a_kind_is_one_file_and_one_line(
    library: ModuleType, kind: registry.ValueKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as line:
        line.setattr(registry, "KINDS", registry.KindTable(kind, *registry.KINDS))  # the one line
        saved, other = _ring(library, 3), _ring(library, 7)
        with fs.Checkpointer(tmp_path / "store") as ckpt:
            ckpt.save(1, {"trainer": {"ring": saved}, "step": 1}).committed.result()
            tensor = other.slots[0]  # type: ignore[attr-defined]
            assert not _same(saved, other)
            ckpt.load({"trainer": {"ring": other}, "step": 0})
            assert _same(saved, other)
            assert tensor is other.slots[0], "in place"  # type: ignore[attr-defined]
        assert "trainer.ring.2.weight" in fs.open(tmp_path / "store").tensors

        nested = library.Ring([None])
        nested.slots[0] = [nested]
        with fs.Checkpointer(tmp_path / "store") as ckpt:
            with pytest.raises(fs.UnsupportedStateError, match=r"ring\.0\.0' contains itself"):
                ckpt.save(2, {"ring": nested})
            with pytest.raises(fs.MismatchError, match="a ring of 1 slots"):
                ckpt.load({"trainer": {"ring": library.Ring([torch.rand(5)])}, "step": 0})

    refused = pytest.raises(fs.UnsupportedStateError, match=r"(?s)'trainer\.ring' cannot be stored.*_of_rings\.Ring")
    with fs.Checkpointer(tmp_path / "store") as ckpt, refused:
        ckpt.save(3, {"trainer": {"ring": saved}, "step": 3})


def test_the_first_of_the_table_has_the_word_but_after_exact_types(
    library: ModuleType, kind: registry.ValueKind
) -> None:
    class Own(library.Ring):  # type: ignore[name-defined, misc]
        pass

    kinds = registry.KindTable(*registry.KINDS, kind)
    assert kinds.find(library.Ring([])) is kind
    assert kinds.find(Own([])) is not kind, "derived types are what an earlier kind recognises"
    assert type(kinds.find(Own([]))).__name__ == "PlainKind"


@pytest.mark.parametrize("own", sorted(registry.built_in_types(), key=str))
def test_no_provider_takes_over_what_a_kind_has(own: type) -> None:
    class Mine(fs.Provider[object]):
        def describe(self, value: object) -> list[fs.Part]:
            return []

        def chunks(self, value: object) -> list[object]:
            return []

        def restore(self, value: object, stored: object) -> None:
            pass

    with pytest.raises(fs.ProviderError, match="built-in"):
        fs.register_provider(own, Mine())
