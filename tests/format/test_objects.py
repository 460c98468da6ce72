"""Objects: every supported value survives JSON text, everything else is refused by path."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import DamagedError, FlowstoneError, UnsupportedFormatError, UnsupportedStateError
from flowstone.format import objects
from flowstone.format.objects import DEPTH_MAX, NamedConstant, ProviderRecord, TensorRef, decode, encode


def through_text(value: object) -> object:
    return decode(json.loads(json.dumps(encode(value, "state"), allow_nan=False)), "state")


def bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def same(a: object, b: object) -> bool:
    """Equal in type and bit for bit, order of dicts included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bits(a) == bits(b)
    if isinstance(a, complex):
        return (bits(a.real), bits(a.imag)) == (bits(b.real), bits(b.imag))
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple, deque)):
        bounds = not isinstance(a, deque) or a.maxlen == b.maxlen
        return bounds and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return a == b


def labels(values: list[object]) -> list[str]:
    return [f"{i}-{type(value).__name__}" for i, value in enumerate(values)]


VALUES: list[object] = [
    None, True, False, 0, -1, 2**53, -(2**53), 2**53 + 1, -(2**64), 2**20000, 0.0, -0.0, 1.5, 5e-324, 1e308,
    math.inf, -math.inf, math.nan, "", "text", "$text", "snow ☃", "\x00", "\ud800", "a\udfffb", b"", b"\x00\xff",
    bytearray(b"ab"), 1j, complex(-0.0, math.nan), complex(math.inf, -0.0), (), (1,), ((1,), [2]), [], [[], {}],
    {}, {"a": {"b": 1}}, {"$a": 1}, {"\ud800": 1}, {1: 2, True + 1: 3}, {(0, 1): "x", None: "y", 1.5: "z", b"k": 0},
    {False: 1, "False": 2}, OrderedDict([("b", 1), ("a", 2)]), OrderedDict(), Counter("abca"), Counter({3: -1}),
    {1, "a", (2, 3)}, set(), frozenset({1, frozenset({2})}), deque([1, [2]], maxlen=5), deque(), deque(maxlen=0),
    range(3), range(10, -4, -2), range(2**70, 2**71), slice(None), slice(1, 2**60, None), slice("a", (1,), 2.5),
    np.bool_(True), np.int8(-3), np.uint64(2**64 - 1), np.float16(1.5), np.float32(-0.0), np.float64(math.nan),
    np.complex64(1 - 2j), np.complex128(complex(math.nan, -0.0)), np.datetime64("2020-01-01T00:00:01", "s"),
    np.timedelta64(5, "ns"), np.datetime64("NaT"), np.str_("s\ud800"), np.bytes_(b"\x00a"),
    TensorRef("model.w", "tensor"), TensorRef("a", "ndarray"), TensorRef("b", "bytes"), TensorRef("c", "bytearray"),
    NamedConstant("torch.dtype", "bfloat16"), {NamedConstant("torch.dtype", "float32"): 1},
    ProviderRecord("kind", {}, {}),
    ProviderRecord("é", {"a.b": TensorRef("s.a.b", "tensor")}, {"n": (1, {2: [None]}), "$": 1}),
    [
        ProviderRecord(
            "a", {"x": TensorRef("x", "ndarray"), "y": TensorRef("y", "tensor")}, {"in": ProviderRecord("b", {}, {})}
        )
    ],
]


@pytest.mark.parametrize("value", VALUES, ids=labels(VALUES))
def test_every_supported_value_survives_text(value: object) -> None:
    assert same(through_text(value), value)
    assert same(through_text({"k": [value]}), {"k": [value]})


@pytest.mark.parametrize("value", VALUES, ids=labels(VALUES))
def test_msgspec_writes_the_same_values(value: object) -> None:
    assert same(decode(msgspec.json.decode(msgspec.json.encode(encode(value, "state"))), "state"), value)


@given(st.integers(0, 2**64 - 1))
def test_every_float_keeps_its_bits(pattern: int) -> None:
    value = struct.unpack(">d", pattern.to_bytes(8, "big"))[0]
    assert bits(through_text(value)) == pattern.to_bytes(8, "big").hex()  # type: ignore[arg-type]


@given(st.integers(0, 2**32 - 1))
def test_every_numpy_float_keeps_its_bits(pattern: int) -> None:
    value = np.frombuffer(pattern.to_bytes(4, "little"), np.float32)[0]
    assert through_text(value).tobytes() == pattern.to_bytes(4, "little")  # type: ignore[attr-defined]


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None)),
    st.binary(),
)
KEYS = st.one_of(LEAVES, st.tuples(LEAVES, LEAVES), st.frozensets(st.integers()))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner),
        st.dictionaries(st.text(), inner),
        st.builds(OrderedDict, st.dictionaries(KEYS, inner)),
        st.builds(deque, st.lists(inner, max_size=3), st.integers(3, 5)),
    ),
    max_leaves=12,
)


@given(TREES)
def test_any_tree_survives_text(tree: object) -> None:
    assert same(through_text(tree), tree)


def test_plain_values_are_plain_json() -> None:
    value = {"step": 3, "lr": [0.1, None, True], "name": "run"}
    assert encode(value, "s") == value


def test_sets_are_written_in_one_order() -> None:
    assert encode(set("zyxab"), "s") == {"$set": ["a", "b", "x", "y", "z"]}


def test_encoding_changes_nothing_and_keeps_nothing() -> None:
    value = {"a": [1, {2: bytearray(b"x")}]}
    node = encode(value, "s")
    value["a"].append(5)  # type: ignore[union-attr]
    value["a"][1][2][0] = 0  # type: ignore[index]
    assert decode(node, "s") == {"a": [1, {2: bytearray(b"x")}]}


class Colour(enum.Enum):
    RED = 1


class Text(str):
    __slots__ = ()


class Number(enum.IntEnum):
    ONE = 1


UNSUPPORTED: list[object] = [
    lambda: 1, Colour.RED, Number.ONE, Text("a"), object(), int, json, defaultdict(list), np.float32, print,
    namedtuple("Point", "x")(1), np.longdouble(1), np.void(b"ab"), 1 .__add__, memoryview(b"a"), iter([1]), {}.keys(),
]


@pytest.mark.parametrize("value", UNSUPPORTED, ids=lambda value: type(value).__name__)
def test_everything_else_is_refused_by_path(value: object) -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        encode({"a": [0, {3: value}]}, "section")
    assert "'section.a.1.3'" in str(caught.value)
    assert type(value).__name__ in str(caught.value)
    assert "next" in str(caught.value)


def test_an_unsupported_key_is_refused_by_path() -> None:
    with pytest.raises(UnsupportedStateError, match=r"section\.a key"):
        encode({"a": {Colour.RED: 1}}, "section")


def test_a_cycle_is_refused_by_path() -> None:
    inner: list[object] = []
    inner.append({"up": inner})
    with pytest.raises(UnsupportedStateError, match=r"section\.a\.0\.up"):
        encode({"a": inner}, "section")


def test_a_value_twice_is_no_cycle() -> None:
    inner = [1]
    assert through_text([inner, inner]) == [[1], [1]]


def nested(depth: int, wrap: Callable[[object], object]) -> object:
    value: object = 1
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPS = [lambda v: [v], lambda v: {1: v}, lambda v: {"a": v}, lambda v: deque([v]), lambda v: slice(v)]


@pytest.mark.parametrize("wrap", WRAPS)
def test_depth_is_bounded_on_both_sides(wrap: Callable[[object], object]) -> None:
    deepest = nested(DEPTH_MAX, wrap)
    assert same(through_text(deepest), deepest)
    with pytest.raises(UnsupportedStateError, match="levels deep"):
        encode(nested(DEPTH_MAX + 1, wrap), "section")


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"a": v}, lambda v: {"$tuple": [v]}])
def test_hostile_depth_is_damage(wrap: Callable[[object], object]) -> None:
    with pytest.raises(DamagedError):
        decode(nested(100_000, wrap), "section")


def test_an_unknown_tag_is_a_newer_feature() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"section\.a"):
        decode({"a": {"$later": 1}}, "section")


MALFORMED: list[object] = [
    math.nan, math.inf, 2**53 + 1, "\ud800", {"\ud800": 1}, {1: 2}, (1,), b"a",
    {"$int": 5}, {"$int": "0x5"}, {"$int": ""}, {"$int": "-"}, {"$int": "00"}, {"$int": "5", "x": 1},
    {"$int": "5", "$float": "0"}, {"$float": "7ff"}, {"$float": "7FF0000000000000"}, {"$float": None},
    {"$complex": [1.0]}, {"$complex": [1, 2]}, {"$text": "é"}, {"$text": "/w=="}, {"$text": 1}, {"$bytes": "a"},
    {"$bytes": "YQ==!"}, {"$bytearray": []}, {"$tuple": {}}, {"$tuple": 1}, {"$dict": [[1]]}, {"$dict": [1]},
    {"$dict": {"a": 1}}, {"$dict": [[[], 1]]}, {"$dict": [[1, 2], [1.0, 3]]}, {"$dict": [[1, 2], [1, 2]]},
    {"$ordered": 1}, {"$counter": [["a", 1], ["a", 1]]}, {"$set": [[]]}, {"$set": [1, 1]}, {"$frozenset": [{}]},
    {"$deque": [1]}, {"$deque": [1], "maxlen": 0}, {"$deque": [], "maxlen": -1}, {"$deque": [], "maxlen": "1"},
    {"$deque": [], "maxlen": True}, {"$range": [1, 2]}, {"$range": [1, 2, 0]}, {"$range": [1, 2.0, 1]},
    {"$slice": [1]}, {"$numpy": "float32"}, {"$numpy": "float32", "hex": "00"}, {"$numpy": "object", "hex": "00"},
    {"$numpy": "float32", "text": "a"}, {"$numpy": "str", "hex": "00"}, {"$numpy": "bool", "hex": "02"},
    {"$numpy": 3, "hex": "00"}, {"$numpy": "V8", "hex": "00" * 8}, {"$numpy": "str", "text": b"a"},
    {"$named": "torch.dtype"}, {"$named": 1, "text": "a"}, {"$named": "a", "text": 1}, {"$tensor": 1},
    {"$ndarray": None}, {"$bytes_at": []}, {"$tensor": "a", "kind": "b"},
    {"$provided": "k"}, {"$provided": "k", "parts": {}}, {"$provided": "k", "objects": {}},
    {"$provided": 3, "parts": {}, "objects": {}}, {"$provided": "k", "parts": [], "objects": {}},
    {"$provided": "k", "parts": {}, "objects": 1}, {"$provided": "k", "parts": {"a": 1}, "objects": {}},
    {"$provided": "k", "parts": {"a": {"$bytes_at": "n"}}, "objects": {}},
    {"$provided": "k", "parts": {}, "objects": {"$dict": [[1, 2]]}},
    {"$provided": "k", "parts": {}, "objects": {"$ordered": [["a", 2]]}},
]


@pytest.mark.parametrize("node", MALFORMED, ids=labels(MALFORMED))
def test_a_malformed_node_is_damage_named_by_path(node: object) -> None:
    with pytest.raises(DamagedError, match=r"section\.a\.0"):
        decode({"a": [node]}, "section")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([
                *objects._LEAF_TAGS, *objects._NODE_TAGS, "a", "maxlen", "text", "hex", "data", "parts", "objects"
            ]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=10,
)


@given(JSON)
def test_any_json_decodes_or_is_a_typed_error(node: object) -> None:
    try:
        value = decode(node, "s")
    except FlowstoneError:
        return
    assert same(through_text(value), value)


def outcome(read: Callable[[], object]) -> object:
    try:
        return True, read()
    except FlowstoneError as error:
        return False, type(error), str(error)


REFERENCES = st.dictionaries(
    st.sampled_from(["a", "b.c", "", "$", "$tensor", "a$", "\ud800", "\""]),
    st.one_of(
        st.fixed_dictionaries({"$tensor": st.one_of(st.text(max_size=3), st.just(1))}),
        st.sampled_from([{"$tensor": "t", "more": 1}, {"$ndarray": "t"}, {}, None, [{"$tensor": "t"}]]),
    ),
    max_size=4,
)


@given(st.one_of(JSON, REFERENCES))
def test_text_decodes_as_its_node_does(node: object) -> None:
    text = json.dumps(node, allow_nan=False) if _is_finite(node) else "null"
    try:
        parsed = msgspec.json.decode(text)
    except msgspec.DecodeError:
        with pytest.raises(msgspec.DecodeError):
            objects.decode_text(text.encode(), "s")
        return
    ours, theirs = outcome(lambda: objects.decode_text(text.encode(), "s")), outcome(lambda: decode(parsed, "s"))
    assert same(ours, theirs)


def _is_finite(node: object) -> bool:
    try:
        json.dumps(node, allow_nan=False)
    except ValueError:
        return False
    return True


def test_a_dict_of_references_is_decoded_without_a_node_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "decode", None)
    text = b'{"a":{"$tensor":"m.a"},"b":{"$tensor":"m.b"}}'
    assert objects.decode_text(text, "m") == {"a": TensorRef("m.a", "tensor"), "b": TensorRef("m.b", "tensor")}
