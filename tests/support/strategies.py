"""Random states for property tests, and helpers that compare and blank them.

`states()` draws states as a user could save them: nested containers of tensors, arrays and plain values, with tensors
tied, strided and empty. `blank()` makes the state into which a new process would load, and `assert_same()` compares
bit for bit.
"""

from __future__ import annotations

import struct
import warnings
from collections import Counter, OrderedDict, deque

import numpy as np
import torch
from hypothesis import strategies as st

from flowstone.table.dtype import DTYPES

# Older torch lacks the newest.
TORCH_DTYPES = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]
NUMPY_DTYPES = [
    np.dtype(name)
    for name in DTYPES
    if name.startswith(("bool", "int", "uint", "float", "complex")) and name in np.sctypeDict
    and np.dtype(name).type.__module__ == "numpy"  # other libraries register theirs when they are imported
]

# The tests of the index cover binary text in names; here keys vary in type and characters.
KEYS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters=".\0"), max_size=5),
    st.integers(-3, 2**70),
    st.tuples(st.integers(0, 3), st.booleans()),
    st.none(),
    st.booleans(),
    st.floats(0, 1),
    st.binary(max_size=2),
)
SECTIONS = st.text(st.characters(codec="utf-8", exclude_characters=".\0@_"), min_size=1, max_size=6)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None), max_size=8),
    st.binary(max_size=8),
    st.builds(bytearray, st.binary(max_size=8)),
    st.integers(65_537, 70_000).map(bytes),
    st.sets(st.integers(), max_size=3),
    st.frozensets(st.tuples(st.integers(), st.text(max_size=2)), max_size=3),
    st.builds(Counter, st.text(max_size=4)),
    st.builds(deque, st.lists(st.integers(), max_size=3), st.sampled_from([None, 3, 9])),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9)),
    st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), np.dtype("int16"), slice(1, None)]),
    st.integers(0, 2**32 - 1).map(lambda bits: np.frombuffer(bits.to_bytes(4, "little"), np.float32)[0]),
    st.sampled_from([np.int64(-5), np.bool_(True), np.complex128(1j), np.datetime64("2024-02-29", "D")]),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype, shape and layout, with any bits."""
    dtype, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(SHAPES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # complex32: "support is experimental"
        tensor = torch.empty(shape, dtype=dtype)
    raw = raw_bytes(tensor)
    data = draw(st.binary(min_size=raw.size, max_size=raw.size))
    raw[...] = np.frombuffer(data, np.uint8).reshape(raw.shape) & (1 if dtype is torch.bool else 255)
    view = draw(st.sampled_from(["whole", "transposed", "every other", "inside"]))
    if view == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if view == "every other" and shape:
        return tensor[::2]
    if view == "inside" and shape:
        return tensor[..., 1:]
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """A numpy array of any supported dtype, C or Fortran order, or running backwards."""
    dtype, shape = draw(st.sampled_from(NUMPY_DTYPES)), draw(SHAPES)
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8)
    array = (data & (1 if dtype.kind == "b" else 255)).view(dtype).reshape(shape)
    view = draw(st.sampled_from(["whole", "transposed", "backwards"]))
    if view == "transposed":
        return array.T
    return array[::-1] if view == "backwards" and shape else array


@st.composite
def plain_values(draw: st.DrawFn) -> object:
    """A value of any kind that holds no tensor; by a short name, as hypothesis prints strategies."""
    return draw(PLAIN)


def _as_text(key: object) -> str:
    return key if isinstance(key, str) else repr(key)


class State(dict[str, object]):
    """A state that can be printed, since torch cannot print tensors of all its dtypes."""

    def __repr__(self) -> str:
        return _shown(dict(self))


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"<{value.dtype} {tuple(value.shape)} {value.stride()} {raw_bytes(value).tobytes().hex()}>"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple, deque)):
        return f"{type(value).__name__}([{', '.join(map(_shown, value))}])"
    return repr(value)[:200]


def _mappings(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    pairs = st.lists(
        st.tuples(KEYS, inner),
        max_size=4,
        unique_by=(lambda pair: _as_text(pair[0]), lambda pair: pair[0]),
    )
    return st.one_of(pairs.map(dict), pairs.map(OrderedDict))


@st.composite
def states(draw: st.DrawFn) -> State:
    """A state: sections of anything above, in which a tensor can occur several times."""
    pool = draw(st.lists(st.one_of(tensors(), arrays()), min_size=1, max_size=4))
    shared = st.integers(0, len(pool) - 1).map(lambda i: pool[i])
    values = st.recursive(
        st.one_of(plain_values(), shared, tensors()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            _mappings(inner),
            st.lists(st.one_of(plain_values(), shared), max_size=3).map(deque),
        ),
        max_leaves=10,
    )
    return State(draw(st.dictionaries(SECTIONS, values, max_size=4)))


def blank(value: object, memo: dict[int, object] | None = None) -> object:
    """The state of a new process before a load: the same tensors without their values, and no plain values."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    made: object = None
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        raw_bytes(made)[...] = 0
    elif isinstance(value, np.ndarray):
        made = np.zeros_like(value)
    elif type(value) in (dict, OrderedDict, State):
        made = type(value)((key, blank(item, memo)) for key, item in value.items())  # type: ignore[attr-defined]
    elif type(value) in (list, tuple):
        made = type(value)(blank(item, memo) for item in value)  # type: ignore[attr-defined, call-arg]
    elif type(value) is deque:
        made = deque(maxlen=value.maxlen)
    memo[id(value)] = made
    return made


class _Strided:
    """Memory through numpy's array interface."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "data": (address, False), "shape": shape, "strides": strides, "typestr": "|u1", "version": 3,
        }


def strided_bytes(address: int, shape: tuple[int, ...], strides_bytes: tuple[int, ...], item_bytes: int) -> np.ndarray:
    """The bytes of elements in CPU memory, writable, as an additional dimension."""
    if 0 in shape:
        return np.empty((*shape, item_bytes), np.uint8)
    return np.asarray(_Strided(address, (*shape, item_bytes), (*strides_bytes, 1)))


def raw_bytes(value: torch.Tensor | np.ndarray) -> np.ndarray:
    """A tensor's or array's bytes, whatever its dtype and layout."""
    if isinstance(value, np.ndarray):
        return strided_bytes(value.__array_interface__["data"][0], value.shape, value.strides, value.itemsize)
    item = value.element_size()
    return strided_bytes(value.data_ptr(), tuple(value.shape), tuple(s * item for s in value.stride()), item)


def _bits(value: object) -> object:
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, complex):
        return struct.pack(">dd", value.real, value.imag)
    return value


def assert_same(found: object, expected: object, path: str = "state") -> None:
    """Both are of one type and equal in every bit: NaN payloads, signs of zero, order of keys."""
    assert type(found) is type(expected), f"{path}: {type(found)} is not {type(expected)}"
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        assert found.dtype == expected.dtype, f"{path}: {found.dtype} is not {expected.dtype}"  # type: ignore[attr-defined]
        assert found.shape == expected.shape, f"{path}: {found.shape} is not {expected.shape}"  # type: ignore[attr-defined]
        assert np.array_equal(raw_bytes(found), raw_bytes(expected)), f"{path}: values differ"  # type: ignore[arg-type]
    elif isinstance(expected, np.generic):
        assert found.dtype == expected.dtype, path  # type: ignore[attr-defined]
        assert found.tobytes() == expected.tobytes(), path  # type: ignore[attr-defined]
    elif isinstance(expected, dict):
        assert [_bits(key) for key in found] == [_bits(key) for key in expected], f"{path}: keys"  # type: ignore[attr-defined]
        for key, item in expected.items():
            assert_same(found[key], item, f"{path}[{key!r}]")  # type: ignore[index]
    elif isinstance(expected, (list, tuple, deque)) and type(expected) is not torch.Size:
        assert len(found) == len(expected), f"{path}: length"  # type: ignore[arg-type]
        for i, (entry, other) in enumerate(zip(found, expected, strict=True)):  # type: ignore[call-overload]
            assert_same(entry, other, f"{path}[{i}]")
        if isinstance(expected, deque):
            assert found.maxlen == expected.maxlen, path  # type: ignore[attr-defined]
    else:
        assert _bits(found) == _bits(expected), f"{path}: {found!r} is not {expected!r}"
