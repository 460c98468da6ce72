"""Properties: any state is restored bit for bit, and any flipped bit is detected."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowstone as fs
from flowstone.plan.write import plan_writes
from flowstone.state import describe
from forge import content, flip, split_rows
from strategies import State, assert_same, blank, raw_bytes, states, tensors

# The contents are what is tested here, so the cheapest engine will do.
PLAIN = fs.EngineOptions(backend="posix", direct="off", workers=1)


@settings(max_examples=60, deadline=None)
@given(state=states())
def test_any_state_survives_save_and_load_bit_exactly(memory_path: Path, state: State) -> None:
    store = Path(mkdtemp(dir=memory_path))
    with fs.Checkpointer(store, engine=PLAIN) as checkpointer:
        checkpointer.save(1, state)
    target = blank(state)
    with fs.Checkpointer(store, engine=PLAIN) as checkpointer:
        checkpointer.load(target)  # type: ignore[arg-type]
    assert_same(target, state)
    assert fs.open(store, engine=PLAIN).verify().sound


@settings(max_examples=25, deadline=None)
@given(state=states(), header_bytes_max=st.sampled_from([4096, 8192]))
def test_any_state_survives_in_several_segments(
    memory_path: Path, state: State, header_bytes_max: int
) -> None:
    store = Path(mkdtemp(dir=memory_path))
    state["_many"] = [torch.full((1,), float(i)) for i in range(200)]
    small = partial(plan_writes, header_bytes_max=header_bytes_max)
    planned = mock.patch("flowstone.save.plan_cache.plan_writes", small)
    with planned, fs.Checkpointer(store, engine=PLAIN) as checkpointer:
        checkpointer.save(1, state)
    target = blank(state)
    with fs.Checkpointer(store, engine=PLAIN) as checkpointer:
        checkpointer.load(target)  # type: ignore[arg-type]
    assert_same(target, state)
    assert len(fs.open(store).manifest.segments) > 1


def boxes_of(shape: tuple[int, ...]) -> Iterator[fs.Box]:
    """Every box of a small shape, empty ones included."""
    sides = [[(a, b - a) for a in range(n + 1) for b in range(a, n + 1)] for n in shape]
    for chosen in itertools.product(*sides):
        yield fs.Box(tuple(o for o, _ in chosen), tuple(n for _, n in chosen))


@settings(max_examples=40, deadline=None)
@given(tensor=tensors(), data=st.data())
def test_any_box_of_any_tensor_reads_as_slicing_would(
    memory_path: Path, tensor: torch.Tensor, data: st.DataObject
) -> None:
    store = Path(mkdtemp(dir=memory_path))
    with fs.Checkpointer(store, engine=PLAIN) as checkpointer:
        checkpointer.save(1, {"w": tensor})
    checkpoint, raw = fs.open(store, engine=PLAIN), raw_bytes(tensor)
    for _ in range(4):
        box = data.draw(st.sampled_from(list(boxes_of(tuple(tensor.shape)))))
        expected = raw[tuple(map(slice, box.offset, box.end))].tobytes()
        part = checkpoint.read("w", box)
        assert (part.dtype, tuple(part.shape)) == (tensor.dtype, box.shape)
        assert raw_bytes(part).tobytes() == expected
        try:
            array = checkpoint.read("w", box, framework="numpy")
        except fs.UnsupportedStateError:
            name = checkpoint.tensors["w"].dtype
            assert name not in np.sctypeDict or np.dtype(name).type.__module__ != "numpy"
        else:
            assert array.shape == box.shape
            assert array.tobytes() == expected


@pytest.fixture(scope="module")
def wide(memory_path: Path) -> tuple[Path, np.ndarray]:
    """A tensor of several chunks to a row and several rows to a chunk, in two boxes."""
    store = Path(mkdtemp(dir=memory_path)) / "run"
    table = torch.arange(7 * 211 * 1021, dtype=torch.int32).reshape(7, 211, 1021)
    split = lambda state, **how: split_rows(describe(state, **how), "w", 3)  # noqa: E731
    with mock.patch("flowstone.save.planning.describe", split), fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"w": table})
    return store, table.numpy()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_of_a_tensor_of_many_chunks_reads_as_slicing_would(
    wide: tuple[Path, np.ndarray], data: st.DataObject
) -> None:
    store, table = wide
    offset = tuple(data.draw(st.integers(0, n)) for n in table.shape)
    shape = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(table.shape, offset, strict=True))
    box = fs.Box(offset, shape)
    expected = table[tuple(map(slice, box.offset, box.end))]
    assert np.array_equal(fs.open(store).read("w", box, framework="numpy"), expected)
    part = torch.full(shape, -1, dtype=torch.int32)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.load({"w": fs.Shard(part, table.shape, offset)})
    assert np.array_equal(part.numpy(), expected)


# Flipped bits, on a tiny checkpoint with something of everything


def tiny(value: int = 1) -> dict[str, object]:
    shared = torch.full((3,), value, dtype=torch.bfloat16)
    return {
        "w": torch.full((20_000,), float(value)), "b": shared, "tied": shared, "z": torch.zeros(0, 2),
        "objects": {"step": value * 7, "name": "x", "key": (1, None)},
    }


@pytest.fixture(scope="module")
def tiny_store(memory_path: Path) -> Path:
    store = Path(mkdtemp(dir=memory_path)) / "run"
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(3, tiny())
    return store


@pytest.fixture
def copy(tiny_store: Path, memory_path: Path) -> Path:
    store = Path(mkdtemp(dir=memory_path)) / "run"
    shutil.copytree(tiny_store, store)
    return store / "step-00000003"


def loads_as_saved_or_raises(store: Path, checkpointer: fs.Checkpointer) -> bool:
    """Whether a load raised; if not, it must have given what was saved."""
    target = tiny(0)
    before = content(target)
    try:
        checkpointer.load(target)
    except fs.DamagedError as error:
        touched = error.written
    else:
        touched = None
    if touched is not None:
        assert touched or content(target) == before, "changed without a word"
        return True
    assert content(target) == content(tiny()), f"{store}: a load gave other values than were saved"
    return False


@pytest.mark.parametrize("name", ["manifest.json", "objects.json", "index.safetensors"])
def test_any_flipped_bit_of_a_small_file_is_detected(copy: Path, name: str) -> None:
    path = copy / name
    with fs.Checkpointer(copy.parent, engine=PLAIN) as checkpointer:
        for byte in range(path.stat().st_size):
            for bit in range(8) if name == "manifest.json" else (byte % 8,):
                flip(path, byte, bit)
                with pytest.raises(fs.FormatError) as caught:
                    fs.open(copy.parent, engine=PLAIN).check()
                assert name in str(caught.value), f"bit {bit} of byte {byte}"
                if byte % 16 == 0:
                    with pytest.raises(fs.DamagedError, match=name.replace(".", r"\.")):
                        fs.open(copy.parent, engine=PLAIN).verify()
                    assert loads_as_saved_or_raises(copy, checkpointer)
                flip(path, byte, bit)
    assert fs.open(copy.parent).verify().sound


def test_any_flipped_bit_of_a_segments_header_is_detected(copy: Path) -> None:
    path = copy / "rank-00000.safetensors"
    header_bytes = json.loads((copy / "manifest.json").read_bytes())["segments"][0]["header_bytes"]
    checkpoint = fs.open(copy.parent, engine=PLAIN)
    with fs.Checkpointer(copy.parent, engine=PLAIN) as checkpointer:
        for byte in range(header_bytes):
            flip(path, byte, byte % 8)
            with pytest.raises(fs.DamagedError, match=r"the header of .*rank-00000\.safetensors does not match"):
                checkpoint.check()
            if byte % 64 == 0:
                with pytest.raises(fs.DamagedError, match="header, bytes 0"):
                    checkpoint.verify()
                assert loads_as_saved_or_raises(copy, checkpointer)
            flip(path, byte, byte % 8)
    assert fs.open(copy.parent).verify().sound


def test_a_flipped_bit_behind_the_header_is_detected_or_was_not_asked_for(copy: Path) -> None:
    """Every byte of small pieces and around borders, a sample of the large one and of the padding."""
    path = copy / "rank-00000.safetensors"
    size, ckpt = path.stat().st_size, fs.open(copy.parent, engine=PLAIN)
    extents = [(int(o), int(o + n)) for o, n in zip(ckpt.index.chunks.offset, ckpt.index.chunks.length, strict=True)]
    begin, end = extents[0]
    header_bytes = ckpt.manifest.segments[0].header_bytes
    chosen = {*range(header_bytes, begin, 97), *range(begin, end, 997), *range(end, size, 97), size - 1}
    chosen |= {*range(begin - 8, begin + 8), *range(end - 8, end + 8)} & {*range(header_bytes, size)}
    chosen |= {index for low, high in extents[1:] for index in range(low - 4, high + 4) if index < size}
    with fs.Checkpointer(copy.parent, engine=PLAIN) as checkpointer:
        for byte in sorted(chosen):
            flip(path, byte, byte % 8)
            inside = any(low <= byte < high for low, high in extents)
            if byte % 5 == 0 or byte >= size - 64:
                (finding,) = ckpt.inspect().findings
                assert finding.what.startswith("tensor" if inside else "padding"), f"byte {byte}: {finding.what}"
            assert loads_as_saved_or_raises(copy, checkpointer) == inside, f"byte {byte}"
            flip(path, byte, byte % 8)
    assert fs.open(copy.parent).verify().sound


def test_a_flipped_bit_of_the_stores_marker_is_detected_and_harms_no_checkpoint(copy: Path) -> None:
    path = copy.parent / "flowstone.json"
    for byte in range(path.stat().st_size):
        flip(path, byte, byte % 8)
        with pytest.raises(fs.DamagedError, match=r"flowstone\.json"):
            fs.open(copy.parent)
        assert fs.open(copy, engine=PLAIN).objects["objects"]["step"] == 7  # type: ignore[index]
        flip(path, byte, byte % 8)
    assert fs.open(copy.parent).step == 3


# Truncation


@pytest.mark.parametrize("name", ["manifest.json", "objects.json", "index.safetensors", "rank-00000.safetensors"])
def test_a_file_cut_at_any_interesting_length_is_detected(copy: Path, name: str) -> None:
    path = copy / name
    data = path.read_bytes()
    checkpoint = fs.open(copy.parent, engine=PLAIN)
    cuts = {0, 1, 7, 8, 9, 4095, 4096, 4097, 31, len(data) - 4096, len(data) - 31, len(data) - 1}
    if name == "rank-00000.safetensors":
        chunks = checkpoint.index.chunks
        cuts |= {int(offset) for offset in chunks.offset} | {int(offset) for offset in chunks.offset + chunks.length}
    else:
        cuts |= set(range(0, len(data), 7))
    with fs.Checkpointer(copy.parent, engine=PLAIN) as checkpointer:
        for cut in sorted(cut for cut in cuts if 0 <= cut < len(data)):
            path.write_bytes(data[:cut])
            with pytest.raises(fs.DamagedError, match=name.replace(".", r"\.")):
                fs.open(copy.parent, engine=PLAIN).verify()
            assert loads_as_saved_or_raises(copy, checkpointer), f"cut at {cut}"
    path.write_bytes(data)
    assert fs.open(copy.parent).verify().sound
