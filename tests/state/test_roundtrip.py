"""Any state of supported types is restored bit for bit, and describing it changes nothing."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Checkpoint, fingerprint, load, save, stored

from flowstone.state import PerRank, Shard, describe, prepare
from flowstone.table.dtype import DTYPES
from flowstone.torch.tensors import empty
from strategies import TORCH_DTYPES, assert_same, blank, raw_bytes, states, tensors

SLOW = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@SLOW
@given(states())
def test_any_state_survives_bit_exactly(state: dict[str, object]) -> None:
    target = blank(state)
    load(save(state), target)  # type: ignore[arg-type]
    assert_same(target, state)


@SLOW
@given(states())
def test_loading_over_the_state_itself_changes_nothing(state: dict[str, object]) -> None:
    expected = describe(state)
    load(save(state), state)
    assert_same(dict(describe(state).objects), dict(expected.objects))
    assert save(state).objects == save(state).objects


@SLOW
@given(states())
def test_describe_and_prepare_change_nothing(state: dict[str, object]) -> None:
    before = fingerprint(state)
    checkpoint = save(state)
    assert fingerprint(state) == before
    prepare(state, stored(checkpoint))
    assert fingerprint(state) == before


@SLOW
@given(tensors())
def test_any_tensor_keeps_its_bits(tensor: torch.Tensor) -> None:
    target = blank({"t": tensor})
    load(save({"t": tensor}), target)  # type: ignore[arg-type]
    assert_same(target, {"t": tensor})


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)], ids=str)
def test_every_dtype_survives_in_every_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = empty(DTYPES[str(dtype).removeprefix("torch.")], shape)
    raw = raw_bytes(tensor)
    raw[...] = (np.arange(raw.size) % (2 if dtype is torch.bool else 251)).reshape(raw.shape)
    target = blank({"t": tensor, "in": {"side": [tensor]}})
    load(save({"t": tensor, "in": {"side": [tensor]}}), target)  # type: ignore[arg-type]
    assert_same(target, {"t": tensor, "in": {"side": [tensor]}})


def test_a_view_is_stored_exactly_not_its_storage() -> None:
    storage = torch.arange(1_000_000.0)
    checkpoint = save({"a": storage[10:20], "b": storage.view(1000, 1000)[:, 7], "c": storage.view(1000, 1000).t()[:2]})
    assert checkpoint.bytes == 4 * (10 + 1000 + 2000)
    assert checkpoint.tied == {}
    target = {"a": torch.zeros(10), "b": torch.zeros(1000), "c": torch.zeros(2, 1000)}
    load(checkpoint, target)
    assert torch.equal(target["b"], storage.view(1000, 1000)[:, 7])
    assert torch.equal(target["c"], storage.view(1000, 1000).t()[:2])


def test_a_strided_target_is_written_in_place_and_nothing_beside_it() -> None:
    around = torch.full((4, 6), -1.0)
    state = {"w": around[1:3, ::2]}
    load(save({"w": torch.arange(6.0).view(2, 3)}), state)
    expected = torch.full((4, 6), -1.0)
    expected[1:3, ::2] = torch.arange(6.0).view(2, 3)
    assert torch.equal(around, expected)


def test_an_expanded_tensor_is_saved_as_all_its_elements() -> None:
    target = {"t": torch.zeros(3, 2)}
    load(save({"t": torch.tensor([1.0, 2.0]).expand(3, 2)}), target)
    assert torch.equal(target["t"], torch.tensor([1.0, 2.0]).expand(3, 2))


def test_conjugate_and_negative_views_are_saved_and_loaded_by_value() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": z.conj(), "imag": z.conj().imag, "z": z}
    assert state["conj"].is_conj()
    assert state["imag"].is_neg()
    other = torch.zeros(2, dtype=torch.complex64)
    target = {"conj": other.conj(), "imag": torch.zeros(2, dtype=torch.complex64).conj().imag, "z": torch.zeros_like(z)}
    load(save(state), target)
    assert torch.equal(target["conj"], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(other, z)
    assert torch.equal(target["imag"], torch.tensor([-2.0, 4.0]))
    assert torch.equal(target["z"], z)


def test_tied_tensors_are_stored_once() -> None:
    shared = torch.arange(4.0)
    checkpoint = save({"a": shared, "b": [shared, shared.view(2, 2)], "c": shared[:2], "d": shared.view(torch.int32)})
    assert checkpoint.tied == {"b.0": "a"}
    assert set(checkpoint.tensors) == {"a", "b.1", "c", "d"}


def test_a_tensor_and_the_array_over_its_memory_are_tied() -> None:
    tensor = torch.arange(4.0)
    assert save({"a": tensor, "b": tensor.numpy()}).tied == {"b": "a"}


def test_tensors_without_elements_are_not_tied() -> None:
    state = {"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(0, 3)}
    assert save(state).tied == {}
    load(save(state), state)


def test_tied_targets_are_wanted_once_and_named_twice() -> None:
    shared = torch.zeros(4)
    restoration = prepare({"a": shared, "b": shared}, stored(save({"a": torch.ones(4), "b": torch.ones(4)})))
    assert [piece.name for piece in restoration.pieces] == ["a"]
    assert [(alias.name, alias.target) for alias in restoration.aliases] == [("b", "a")]


def test_separate_targets_of_tied_tensors_are_both_written() -> None:
    shared = torch.arange(4.0)
    target = {"a": torch.zeros(4), "b": torch.zeros(4)}
    load(save({"a": shared, "b": shared}), target)
    assert torch.equal(target["a"], shared)
    assert torch.equal(target["b"], shared)


def test_a_leaf_that_requires_grad_is_written_and_stays_a_leaf() -> None:
    target = {"w": torch.zeros(3, requires_grad=True)}
    version = target["w"]._version
    load(save({"w": torch.ones(3)}), target)
    assert torch.equal(target["w"].detach(), torch.ones(3))
    assert target["w"].is_leaf
    assert target["w"].requires_grad
    assert target["w"]._version > version, "a graph that saved the old values has to notice"


def test_inference_tensors_are_written() -> None:
    with torch.inference_mode():
        target = {"w": torch.zeros(3)}
    load(save({"w": torch.ones(3)}), target)
    assert torch.equal(target["w"], torch.ones(3))


def test_scalars_are_replaced_in_their_containers() -> None:
    inner: dict[str, object] = {"epoch": 0, "w": torch.zeros(2), "best": None}
    state = {"train": inner, "step": 0, "pair": (1, torch.zeros(1)), "list": [torch.zeros(1), 5]}
    pair = state["pair"]
    saved = {
        "train": {"epoch": 7, "w": torch.ones(2), "best": 0.5},
        "step": 11,
        "pair": ("two", torch.ones(1)),
        "list": [torch.ones(1), "six"],
    }
    load(save(saved), state)
    assert state["train"] is inner
    assert_same(state, saved)
    assert state["pair"][1] is pair[1]  # type: ignore[index]


def test_plain_containers_keep_their_identity() -> None:
    state = {"a": {"b": {"c": 1, "gone": 2}, "l": [[1], {}]}, "s": {1}, "d": deque([1], 3), "c": Counter("a")}
    held = [state["a"], state["a"]["b"], state["a"]["l"], state["a"]["l"][0], state["s"], state["c"]]  # type: ignore[index]
    saved = {"a": {"b": {"c": 2, "new": [3]}, "l": [[9, 8], 4, 5]}, "s": {2}, "d": deque([7], 3), "c": Counter("bb")}
    load(save(saved), state)
    assert_same(state, saved)
    now = [state["a"], state["a"]["b"], state["a"]["l"], state["a"]["l"][0], state["s"], state["c"]]  # type: ignore[index]
    assert all(first is other for first, other in zip(held, now, strict=True))


def test_a_container_in_two_places_takes_two_values_apart() -> None:
    shared = {"x": 0}
    state = {"a": shared, "b": shared, "c": [shared]}
    load(save({"a": {"x": 1}, "b": {"x": 2}, "c": [{"x": 1}]}), state)
    assert state == {"a": {"x": 1}, "b": {"x": 2}, "c": [{"x": 1}]}
    assert state["a"] is shared
    assert state["c"][0] is shared


def test_tensors_in_a_deque_follow_the_checkpoint() -> None:
    state = {"losses": deque([torch.zeros(1)], maxlen=4)}
    shared = torch.ones(2)
    load(save({"losses": deque([shared, torch.zeros(0), shared], maxlen=4)}), state)
    assert len(state["losses"]) == 3
    assert state["losses"][0] is state["losses"][2]


def test_long_bytes_lie_in_a_tensor() -> None:
    long, longer = b"x" * 65_537, bytearray(b"y" * 100_000)
    checkpoint = save({"a": {"b": long, "c": longer}, "short": b"z" * 65_536})
    assert set(checkpoint.tensors) == {"a.b", "a.c"}
    state = {"a": {"b": b"", "c": bytearray(b"q")}, "short": b""}
    held = state["a"]["c"]
    load(checkpoint, state)
    assert state == {"a": {"b": long, "c": longer}, "short": b"z" * 65_536}
    assert state["a"]["c"] is held


def test_described_objects_are_not_the_users() -> None:
    state = {"a": {"l": [1], "b": bytearray(b"x"), "d": deque([[1]]), "s": {1}}, "long": bytearray(100_000)}
    described = describe(state)
    checkpoint_objects = repr(described.objects)
    state["a"]["l"].append(2)  # type: ignore[index, union-attr]
    state["a"]["b"].extend(b"y")  # type: ignore[index, union-attr]
    state["a"]["d"][0].append(2)  # type: ignore[index]
    state["a"]["s"].add(2)  # type: ignore[index, union-attr]
    state["long"].extend(b"z")  # type: ignore[union-attr]
    assert repr(described.objects) == checkpoint_objects


def test_numpy_arrays_are_written_in_place() -> None:
    around = np.zeros((4, 6), np.float32)
    back = np.zeros(3, np.int16)
    scalar = np.zeros((), np.complex128)
    state = {"a": around[::2, 1:3], "back": back[::-1], "scalar": scalar, "f": np.zeros((2, 3), order="F")}
    saved = {
        "a": np.arange(4, dtype=np.float32).reshape(2, 2),
        "back": np.array([1, 2, 3], np.int16)[::-1],
        "scalar": np.array(2 + 1j),
        "f": np.arange(6.0).reshape(2, 3),
    }
    load(save(saved), state)
    assert_same(state, saved)
    assert around[0, 1] == 0
    assert around[2, 2] == 3
    assert back.tolist() == [1, 2, 3]


def test_keys_of_every_kind_make_names() -> None:
    state = {
        "s": {3: torch.ones(1), (0, 1): torch.ones(2), None: torch.ones(3), "": torch.ones(4), True: torch.ones(5)}
    }
    checkpoint = save(state)
    assert set(checkpoint.tensors) == {"s.3", "s.(0, 1)", "s.None", "s.", "s.True"}
    load(checkpoint, blank(state))  # type: ignore[arg-type]


def test_constants_survive_as_keys_too() -> None:
    state = {
        "s": {torch.float16: torch.ones(1), "d": torch.float8_e4m3fn, "t": (torch.device("cuda:1"), torch.Size([]))}
    }
    target = {"s": {torch.float16: torch.zeros(1), "d": None, "t": None}}
    load(save(state), target)
    assert_same(target, state)
    plain = {"s": {torch.float16: 1, np.dtype("int8"): {torch.strided, torch.channels_last}}}
    target = {"s": {}}
    load(save(plain), target)
    assert_same(target, plain)


def test_an_ordered_dict_with_tensors_is_written_in_place() -> None:
    state = {"sd": OrderedDict(a=torch.zeros(1), b=torch.zeros(2))}
    held = state["sd"]["a"]
    load(save({"sd": OrderedDict(b=torch.ones(2), a=torch.ones(1))}), state)
    assert held.item() == 1


def test_an_empty_state_is_a_state() -> None:
    assert save({}) == Checkpoint(per_rank=[{}])
    load(save({}), {})


@given(st.integers(0, 3))
def test_restoration_does_not_touch_other_sections(count: int) -> None:
    state = {f"s{i}": torch.full((2,), float(i)) for i in range(count)}
    checkpoint = save({**state, "other": torch.ones(1), "s": {"x": 1}})
    target = {name: torch.zeros(2) for name in state}
    load(checkpoint, target)
    assert_same(target, state)


def test_the_fingerprint_sees_every_change() -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    generator = torch.Generator()
    array = np.zeros(3)
    state = {"m": module, "o": optimizer, "g": generator, "a": [array, {"x": 1}]}
    changes = [
        lambda: module.weight.data.fill_(1),
        lambda: optimizer.state[module.weight],
        lambda: optimizer.state[module.weight].update(step=1),
        lambda: optimizer.param_groups[0].update(lr=3),
        lambda: generator.manual_seed(5),
        lambda: array.fill(1),
        lambda: state["a"][1].update(x=2),
        lambda: state["a"].append(1),
    ]
    before = fingerprint(state)
    for change in changes:
        change()
        assert fingerprint(state) != before
        before = fingerprint(state)


def test_read_only_arrays_are_replaced_by_read_only_arrays() -> None:
    def made(first: float) -> dict[str, object]:
        arrays = [np.full((2, 3), first + index) for index in range(4)]
        for array in arrays:
            array.setflags(write=False)
        packed = np.frombuffer(np.full(3, first).tobytes())
        return {
            "top": arrays[0], "inside": {"list": [arrays[1], 1], "tuple": (arrays[2], "x")},
            "shard": Shard(arrays[3], (4, 3), (2, 0)), "own": PerRank(packed), "backwards": {"v": packed[::-1]},
        }

    source, target = made(1), made(7)
    shard, inside, before = target["shard"], target["inside"], target["top"]
    load(save(source), target)
    assert (target["shard"], target["inside"]) == (shard, inside)
    assert target["top"] is not before
    actual, expected = ([
        state["top"], state["inside"]["list"][0], state["inside"]["tuple"][0],  # type: ignore[index]
        state["shard"].tensor, state["own"].value, state["backwards"]["v"],  # type: ignore[attr-defined, index]
    ] for state in (target, source))
    for array, other in zip(actual, expected, strict=True):
        assert np.array_equal(array, other)
        assert not array.flags.writeable


@pytest.mark.parametrize("target", [np.frombuffer(bytes(16)), np.frombuffer(bytes(24), np.float32)])
def test_a_read_only_array_is_not_replaced_by_one_of_another_shape_or_type(target: np.ndarray) -> None:
    (piece,) = prepare({"a": target}, stored(save({"a": np.ones(3)}))).pieces
    assert (piece.shape, piece.dtype.name) == (target.shape, target.dtype.name), "so that the conductor refuses it"
