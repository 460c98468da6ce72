"""Generators continue with exactly the numbers that they would have drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from reference import Checkpoint, load, process_generators, save, stored

from flowstone.errors import StateError, UnsupportedStateError
from flowstone.state import PerRank, describe, prepare
from flowstone.state.kinds.generator import rng
from flowstone.torch import generators

GENERATORS: dict[str, tuple[Callable[[int], object], Callable[[object], object]]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.rand(3, generator=g).tolist()),  # type: ignore[arg-type]
    "PCG64": (lambda seed: np.random.Generator(np.random.PCG64(seed)), lambda g: g.random(3).tolist()),  # type: ignore[attr-defined]
    "PCG64DXSM": (lambda seed: np.random.Generator(np.random.PCG64DXSM(seed)), lambda g: g.normal(size=3).tolist()),  # type: ignore[attr-defined]
    "MT19937": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda g: g.random(3).tolist()),  # type: ignore[attr-defined]
    "Philox": (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda g: g.integers(9, size=3).tolist()),  # type: ignore[attr-defined]
    "SFC64": (lambda seed: np.random.Generator(np.random.SFC64(seed)), lambda g: g.random(3).tolist()),  # type: ignore[attr-defined]
    "RandomState": (lambda seed: np.random.RandomState(seed), lambda g: g.normal(size=3).tolist()),  # type: ignore[attr-defined]
    "BitGenerator": (lambda seed: np.random.PCG64(seed), lambda g: g.random_raw(3).tolist()),  # type: ignore[attr-defined]
    "Random": (lambda seed: random.Random(seed), lambda g: [g.gauss(0, 1) for _ in range(3)]),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_is_restored_in_place(name: str) -> None:
    make, draw = GENERATORS[name]
    source, target = make(1), make(2)
    draw(source)
    state: dict[str, object] = {"deep": {"g": target}}
    load(save({"deep": {"g": source}}), state)
    assert state == {"deep": {"g": target}}
    assert draw(target) == draw(source)
    load(save({"g": PerRank(source)}), {"g": PerRank(target)})
    assert draw(target) == draw(source)


@pytest.mark.parametrize("name", GENERATORS)
def test_tables_of_numbers_lie_in_tensors(name: str) -> None:
    checkpoint = save({"g": GENERATORS[name][0](1)})
    assert all(len(text) < 400 for text in checkpoint.objects.values())


@pytest.mark.parametrize(("entry", "other"), [("PCG64", "MT19937"), ("Random", "PCG64"), ("torch", "Random")])
def test_another_kind_of_generator_is_a_difference(entry: str, other: str) -> None:
    checkpoint = save({"g": GENERATORS[entry][0](1)})
    differences = prepare({"g": GENERATORS[other][0](1)}, stored(checkpoint)).differences
    assert [(d.kind, d.name) for d in differences] == [("kind", "g")]
    assert other in differences[0].expected or other == "Random"


def test_an_absent_generator_is_a_difference() -> None:
    differences = prepare({"g": random.Random(1)}, stored(save({}))).differences
    assert [(d.kind, d.name) for d in differences] == [("missing", "g")]


def test_a_generator_without_state_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match="'g'"):
        describe({"g": random.SystemRandom()})


def test_a_stored_state_that_the_generator_refuses_is_named() -> None:
    checkpoint = save({"g": np.random.PCG64(1)})
    checkpoint.objects["g"] = checkpoint.objects["g"].replace('"has_uint32": 0', '"has_uint32": "x"')
    with pytest.raises(StateError, match="'g'"):
        load(checkpoint, {"g": np.random.PCG64(1)})


def draw_all() -> list[object]:
    return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.rand(2).tolist()]


@pytest.fixture(autouse=True)
def _generators_as_before() -> object:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_the_process_goes_on_with_the_same_numbers() -> None:
    draw_all()
    state = {"rng": rng()}
    checkpoint = save(state)
    expected = draw_all(), draw_all()
    load(checkpoint, {"rng": rng()})
    assert (draw_all(), draw_all()) == expected


def test_describe_and_prepare_draw_nothing() -> None:
    before = process_generators()
    checkpoint = save({"rng": rng()})
    restoration = prepare({"rng": rng()}, stored(checkpoint))
    assert process_generators() == before
    restoration.finish  # noqa: B018 - kept alive: it owns the memory
    random.random()
    assert process_generators() != before


def test_generators_come_after_objects_that_may_draw() -> None:
    class Loader:
        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, _: dict[str, object]) -> None:
            draw_all()

    state = {"rng": rng(), "loader": Loader()}
    checkpoint = save(state)
    expected = draw_all()
    load(checkpoint, state)
    assert draw_all() == expected


def test_every_rank_keeps_its_own() -> None:
    checkpoint = Checkpoint()
    expected = []
    for rank in range(3):
        torch.manual_seed(rank)
        random.seed(rank)
        save({"rng": rng()}, rank=rank, into=checkpoint)
        expected.append(draw_all()[-1])
    assert {name.split(".")[0] for name in checkpoint.tensors} == {"rng@0", "rng@1", "rng@2"}
    for rank in range(5):
        load(checkpoint, {"rng": rng()}, rank=rank)
        assert draw_all()[-1] == expected[rank % 3]


def test_gpu_generators_that_are_not_here_are_left_out_with_a_note() -> None:
    with mock.patch.object(generators, "cuda_states", return_value=[torch.arange(16, dtype=torch.uint8)] * 2):
        checkpoint = save({"rng": rng()})
    assert "rng@0.cuda.0" in checkpoint.tensors
    with mock.patch.object(generators, "cuda_count", return_value=0):
        notes = load(checkpoint, {"rng": rng()}).notes
    missing = (
        "this process has 2 GPU(s) fewer than the process that saved; "
        "the generators of the missing GPUs were skipped"
    )
    assert notes == (f"rng@0: {missing}",)


def test_all_ranks_and_own_values_do_not_mix() -> None:
    differences = prepare({"x": PerRank(1)}, stored(save({"x": 1}))).differences
    assert [(d.kind, d.name) for d in differences] == [("kind", "x")]
    differences = prepare({"x": 1}, stored(save({"x": PerRank(1)}))).differences
    assert [(d.kind, d.name) for d in differences] == [("kind", "x")]
    differences = prepare({"x": PerRank(1)}, stored(save({}))).differences
    assert [(d.kind, d.name) for d in differences] == [("missing", "x@0")]
