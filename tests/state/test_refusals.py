"""Values that cannot be saved or loaded are refused by path, with the remedy, before anything changes."""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from reference import save, stored
from torch._subclasses.fake_tensor import FakeTensorMode

from flowstone.errors import CollisionError, DamagedError, UnsupportedFormatError, UnsupportedStateError
from flowstone.format.objects import DEPTH_MAX, NamedConstant, TensorRef
from flowstone.state import StoredState, TensorSpec, describe, prepare
from flowstone.table.dtype import DTYPES
from flowstone.torch.tensors import dtype_of, empty, memory_of


class Subclass(torch.Tensor):
    pass


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2)


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


UNSUPPORTED: dict[str, object] = {
    "lambda": lambda: lambda: 1,
    "class": lambda: torch.nn.Linear,
    "file": tempfile.TemporaryFile,
    "lock": threading.Lock,
    "object": object,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": quantized,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
    "meta": lambda: torch.empty(2, device="meta"),
    "fake": fake,
    "subclass": lambda: torch.ones(2).as_subclass(Subclass),
    "zero": lambda: torch._efficientzerotensor(2),
    "freed": freed,
    "big-endian": lambda: np.ones(2, ">f4"),
    "record": lambda: np.zeros(2, [("a", "f4")]),
    "dates": lambda: np.array(["2020-01-01"], "M8[D]"),
    "longdouble": lambda: np.ones(2, np.longdouble),
    "masked": lambda: np.ma.masked_array([1, 2], [0, 1]),
    "tensor key": lambda: {torch.ones(1): 1},
    "class key": lambda: {int: 1},
    "set of objects": lambda: {object()},
    "numpy type": lambda: np.float32,
    "record dtype": lambda: np.dtype([("a", "f4")]),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_saved_is_refused_by_path_with_a_remedy(name: str) -> None:
    value = UNSUPPORTED[name]()  # type: ignore[operator]
    for state, path in (({"s": value}, "s"), ({"s": {"a": [0, value]}}, "s.a.1"), ({"s": deque([value])}, "s.0")):
        with pytest.raises(UnsupportedStateError) as caught:
            describe(state)  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"'{path}"), str(caught.value)
        assert "\n  next" in str(caught.value)


@pytest.mark.parametrize("section", ["", "__x", "a@b", "a\0b", "\ud800", 3, None, ("a",)])
def test_a_section_that_cannot_be_a_name_is_refused(section: object) -> None:
    for call in (lambda state: describe(state), lambda state: prepare(state, StoredState({}, {}))):
        with pytest.raises(UnsupportedStateError, match="section"):
            call({section: 1})


@pytest.mark.parametrize("state", [None, [1], torch.nn.Linear(1, 1), "abc"])
def test_a_state_that_is_no_mapping_is_refused(state: object) -> None:
    with pytest.raises(UnsupportedStateError, match="not a mapping"):
        describe(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["a\0b", "\ud800"])
def test_a_key_that_cannot_name_a_tensor_is_refused(key: str) -> None:
    with pytest.raises(UnsupportedStateError, match="cannot name a tensor"):
        describe({"s": {key: torch.ones(1)}})
    describe({"s": {key: 1}})


COLLISIONS = [
    ({"s": {"a.b": 1, "a": {"b": 1}}}, "state['s']['a.b']", "state['s']['a']['b']"),
    ({"s": {3: 1, "3": 1}}, "state['s'][3]", "state['s']['3']"),
    ({"s.a": 1, "s": {"a": 1}}, "state['s.a']", "state['s']['a']"),
    ({"s": [1], "s.0": 1}, "state['s'][0]", "state['s.0']"),
]


def tensors_for(tree: object) -> object:
    if isinstance(tree, dict):
        return {key: tensors_for(item) for key, item in tree.items()}
    return [tensors_for(item) for item in tree] if isinstance(tree, list) else torch.ones(1)


@pytest.mark.parametrize(("state", "first", "second"), COLLISIONS)
def test_two_paths_of_one_name_are_refused_with_both(state: dict[str, object], first: str, second: str) -> None:
    describe(state)  # without tensors there are no names
    for call in (lambda state: describe(state), lambda state: prepare(state, StoredState({}, {}))):
        with pytest.raises(CollisionError) as caught:
            call(tensors_for(state))
        assert first in str(caught.value)
        assert second in str(caught.value)


def test_cycles_are_refused_by_path() -> None:
    line: list[object] = [torch.ones(1)]
    line.append({"up": line})
    queue: deque[object] = deque()
    queue.append([queue])
    for value, path in ((line, r"'s\.1\.up'"), (queue, r"'s\.0\.0'")):
        with pytest.raises(UnsupportedStateError, match=f"{path} contains itself"):
            describe({"s": value})


def test_depth_is_bounded() -> None:
    def nested(depth: int) -> object:
        value: object = 1
        for _ in range(depth):
            value = [value]
        return value

    save({"s": nested(DEPTH_MAX)})
    with pytest.raises(UnsupportedStateError, match="levels deep"):
        describe({"s": nested(DEPTH_MAX + 1)})
    with pytest.raises(UnsupportedStateError, match="levels deep"):
        prepare({"s": nested(100_000)}, StoredState({}, {}))


def test_a_value_twice_is_no_cycle() -> None:
    inner = {"a": [1]}
    assert save({"s": [inner, inner]}).objects["s"] == '[{"a": [1]}, {"a": [1]}]'


def prepared(target: object, source: object) -> object:
    return prepare({"s": target}, stored(save({"s": source})))


def test_targets_that_cannot_be_written_are_refused_by_name() -> None:
    cases = [
        (torch.empty(2, device="meta"), torch.ones(2), "meta"),
        (torch.eye(2).to_sparse(), torch.eye(2), "layout"),
    ]
    for target, source, why in cases:
        with pytest.raises(UnsupportedStateError, match=why) as caught:
            prepared([target], [source])
        assert "'s.0'" in str(caught.value)


def kinds(target: object, source: object) -> list[tuple[str, str]]:
    return [(d.kind, d.name) for d in prepared(target, source).differences]  # type: ignore[attr-defined]


def test_differences_of_objects_are_all_listed() -> None:
    tensor = torch.ones(1)
    assert kinds({"t": tensor, "a": 1, "b": 2}, {"t": tensor}) == [("missing", "s.a"), ("missing", "s.b")]
    assert kinds({"t": tensor}, {"t": tensor, "a": 1, "b": [2]}) == [("unexpected", "s.a"), ("unexpected", "s.b")]
    assert kinds([tensor, 1, 2], [tensor]) == [("missing", "s.1"), ("missing", "s.2")]
    assert kinds([tensor], [tensor, 1]) == [("unexpected", "s.1")]
    assert kinds({"t": tensor, "x": {"y": tensor, "z": 1}}, {"t": tensor, "x": 3}) == [("kind", "s.x")]
    assert kinds([tensor], {0: tensor}) == [("kind", "s")]
    assert kinds((tensor, 1), [tensor, 2]) == []
    assert kinds(OrderedDict(t=tensor, n=1), {"n": 2, "t": tensor}) == []


def test_tensors_that_are_missing_or_too_many_are_not_our_business() -> None:
    tensor = torch.ones(1)
    assert kinds({"t": tensor}, {"u": tensor}) == []
    assert kinds({"t": tensor, "u": tensor}, {}) == []
    assert kinds({"t": None}, {"t": tensor}) == []
    assert kinds({}, {"t": tensor}) == []
    assert kinds([], [tensor]) == []
    assert kinds({"t": tensor}, {"t": 3}) == []
    assert [piece.name for piece in prepared({"t": tensor}, {"t": 3}).pieces] == ["s.t"]  # type: ignore[attr-defined]


def test_one_object_in_two_places_cannot_take_two_values() -> None:
    class Loader:
        n = 1

        def state_dict(self) -> dict[str, object]:
            return {"n": self.n, "nan": float("nan"), "t": torch.full((1,), self.n)}

        def load_state_dict(self, tree: dict[str, object]) -> None:
            self.n = tree["n"]  # type: ignore[assignment]

    first, second = Loader(), Loader()
    assert kinds([first, first, torch.ones(1)], [first, first, torch.ones(1)]) == []
    second.n = 2
    assert kinds([first, first], [first, second]) == [("kind", "s.1")]
    live = {"t": torch.ones(1), "n": 1}
    assert kinds([(live,), (live,)], [(live,), (live,)]) == []
    assert kinds([live, live], [live, {"t": live["t"], "n": 2}]) == [], "a dict becomes two"


def test_a_missing_section_is_a_difference_when_it_holds_objects() -> None:
    state = {"n": 1, "d": {"x": 1}, "t": torch.ones(1), "m": torch.nn.Linear(1, 1)}
    differences = prepare(state, StoredState({}, {})).differences
    assert [(d.kind, d.name) for d in differences] == [("missing", "n"), ("missing", "d")]


def test_objects_that_refer_to_absent_tensors_differ() -> None:
    differences = prepare({"d": deque()}, StoredState({}, {"d": deque([TensorRef("d.0", "tensor")])})).differences
    assert [(d.kind, d.name) for d in differences] == [("missing", "d.0")]


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "ndarray"])
def test_objects_that_refer_to_tensors_of_another_kind_are_damage(kind: str) -> None:
    tensors = {"d.0": TensorSpec(DTYPES["bfloat16"], (2,))}
    with pytest.raises(DamagedError, match=r"d\.0"):
        prepare({"d": deque()}, StoredState(tensors, {"d": deque([TensorRef("d.0", kind)])}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("constant", "error"),
    [
        (NamedConstant("torch.dtype", "nn"), UnsupportedFormatError),
        (NamedConstant("torch.dtype", "float5"), UnsupportedFormatError),
        (NamedConstant("torch.layout", "float32"), UnsupportedFormatError),
        (NamedConstant("torch.device", "abacus:1"), UnsupportedFormatError),
        (NamedConstant("torch.Size", "1,x"), DamagedError),
        (NamedConstant("numpy.dtype", "O"), UnsupportedFormatError),
        (NamedConstant("numpy.dtype", "floaty32"), UnsupportedFormatError),
        (NamedConstant("os.system", "true"), UnsupportedFormatError),
    ],
)
def test_unknown_constants_are_refused_before_anything_changes(constant: NamedConstant, error: type[Exception]) -> None:
    for node in (constant, [constant], {"k": constant}, {constant: 1}, {constant}, (1, frozenset({constant}))):
        with pytest.raises(error, match="'s"):
            prepare({"s": 1}, StoredState({}, {"s": node}))


def test_tensors_for_results_have_the_dtype_and_shape() -> None:
    for name, dtype in DTYPES.items():
        tensor = empty(dtype, (2, 3))
        assert str(tensor.dtype) == f"torch.{name}"
        assert dtype_of(tensor) == dtype
        memory = memory_of(tensor)
        assert memory.shape == (2, 3)
        assert memory.contiguous
        assert memory.address == tensor.data_ptr()
    with pytest.raises(UnsupportedStateError, match="qint8"):
        dtype_of(quantized())


@pytest.mark.parametrize(
    "constant", [NamedConstant("torch.device", "abacus:1"), NamedConstant("numpy.dtype", "floaty32")]
)
def test_why_torch_or_numpy_refuses_a_constant_is_kept(constant: NamedConstant) -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        prepare({"s": 1}, StoredState({}, {"s": constant}))
    assert isinstance(caught.value.__cause__, RuntimeError | TypeError)
