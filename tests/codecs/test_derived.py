"""Derived tensors are not stored: the contents of the files, and the result of every way to read."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import flowstone as fs
from flowstone import _native
from flowstone.config import CHUNK_BYTES
from flowstone.format.codec import CAST, CAST_ELEMENTS
from flowstone.format.index import ChunkForms, ChunkPlaces
from flowstone.store.local import LocalStore
from flowstone.store.wrap import FaultInjectingStore
from forge import content, edit_index, edit_manifest, flip, stored_bytes

DERIVED = fs.EngineOptions(compress="derived")
Tensors = dict[str, torch.Tensor]


def sections() -> dict[str, Tensors]:
    """Working copies in two types, of one and of several chunks, an average that is equal yet, and what is neither."""
    torch.manual_seed(2)
    master = {"wide": torch.randn(1100, 700), "small": torch.randn(200, 200), "odd": torch.randn(262_145)}
    return {
        "model": {name: tensor.bfloat16() for name, tensor in master.items()},
        "half": {name: tensor.half() for name, tensor in master.items()},
        "master": master,
        "average": {name: tensor.clone() for name, tensor in master.items()},
        "moment": {name: torch.randn_like(tensor) for name, tensor in master.items()},
    }


def blank(like: dict[str, Tensors]) -> dict[str, Tensors]:
    return {section: {name: torch.full_like(t, 7) for name, t in of.items()} for section, of in like.items()}


def loads(path: Path, state: dict[str, Tensors]) -> bool:
    """Whether the newest step there is `state`, bit for bit."""
    into = blank(state)
    with fs.Checkpointer(path) as checkpointer:
        checkpointer.load(into)
    return content(into) == content(state)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with fs.Checkpointer(tmp_path / "run", engine=DERIVED) as checkpointer:
        checkpointer.save(1, sections())
    return tmp_path / "run"


def test_working_copies_and_equal_tensors_are_not_stored_and_load_bit_for_bit(run: Path) -> None:
    saved, into = sections(), blank(sections())
    held = sum(t.nbytes for section in ("master", "moment") for t in saved[section].values())
    assert held < stored_bytes(run) < held + 60_000
    assert fs.open(run).manifest.critical == ("delta", "copies", "codec.cast")
    assert fs.open(run).verify().extra == (), "no file is left of which nothing was needed"
    with fs.Checkpointer(run) as checkpointer:
        checkpointer.load(into)
        assert content(into) == content(saved)
        into = blank(saved)
        checkpointer.load(into, verify_first=True)
        assert content(into) == content(saved)
        working = {"model": blank(saved)["model"]}
        checkpointer.load(working)
    assert content(working) == content({"model": saved["model"]})
    made_up = {section.section: section for section in fs.open(run).sections}
    assert made_up["model"].derived == made_up["model"].bytes
    assert (made_up["model"].written, made_up["moment"].derived) == (0, 0)
    assert {made_up["master"].derived, made_up["average"].derived} == {0, made_up["master"].bytes}


def test_parts_are_read_streamed_verified_packed_and_exported(run: Path, tmp_path: Path) -> None:
    saved, checkpoint = sections(), fs.open(run)
    part = checkpoint.read("model.wide", box=fs.Box((371, 5), (600, 9)))
    assert torch.equal(part, saved["model"]["wide"][371:971, 5:14])
    assert torch.equal(checkpoint["half.odd"][262_140:], saved["half"]["odd"][262_140:])
    streamed = dict(checkpoint.stream())
    assert all(torch.equal(streamed[f"{s}.{n}"], t) for s, of in saved.items() for n, t in of.items())
    assert checkpoint.verify().sound
    fs.pack(checkpoint, tmp_path / "whole")
    whole = fs.open(tmp_path / "whole")
    assert whole.manifest.critical == ()
    assert torch.equal(whole.read("model.odd"), saved["model"]["odd"])
    fs.export(checkpoint, tmp_path / "out", section="model")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert all(torch.equal(tensor, saved["model"][name]) for name, tensor in load_file(file).items())


def test_what_is_not_derived_is_found_by_name_by_any_reader_of_safetensors(run: Path) -> None:
    saved = sections()
    tensors = load_file(run / "step-00000001" / "rank-00000.safetensors")
    assert all(torch.equal(tensors[f"moment.{name}"], tensor) for name, tensor in saved["moment"].items())
    assert all(f"master.{name}" in tensors or f"average.{name}" in tensors for name in saved["master"])


def test_only_chunks_with_a_changed_element_are_stored(tmp_path: Path) -> None:
    state = sections()
    state["model"]["wide"][0, 1] += 1
    state["average"]["odd"][-2] += 1
    with fs.Checkpointer(tmp_path, engine=DERIVED) as checkpointer:
        checkpointer.save(1, state)
    assert loads(tmp_path, state)
    made_up = {section.section: section for section in fs.open(tmp_path).sections}
    assert made_up["model"].written == CHUNK_BYTES
    assert made_up["average"].written + made_up["master"].written - made_up["master"].bytes in (4, CHUNK_BYTES)
    assert fs.open(tmp_path).verify().sound


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0, 1e-42, 3.4e38, 65_520.0])
def test_elements_that_are_special_come_back_as_they_were(tmp_path: Path, special: float) -> None:
    master = torch.randn(300_000)
    master[100_000] = special
    state = {"model": {"w": master.bfloat16(), "h": master.half()}, "master": {"w": master}}
    with fs.Checkpointer(tmp_path, engine=DERIVED) as checkpointer:
        checkpointer.save(1, state)
    assert loads(tmp_path, state)
    (model,) = (section for section in fs.open(tmp_path).sections if section.section == "model")
    assert model.derived == (0 if special != special else model.bytes)  # what NaN becomes differs between processors


@pytest.mark.parametrize("plain", [False, True])
def test_numbers_are_rounded_as_torch_rounds_them(plain: bool) -> None:
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    offsets = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, np.uint32)
    bits = np.concatenate([(high[:, None] | offsets).reshape(-1), drawn])
    bits = bits[(bits & 0x7FFFFFFF) <= 0x7F800000]
    for part in np.array_split(bits, 4):
        singles = torch.from_numpy(part.view(np.float32).copy())
        for name, element in CAST_ELEMENTS.items():
            expected = singles.to(getattr(torch, name)).view(torch.int16).numpy().tobytes()
            assert _native.cast_numbers(part, element, plain) == expected


def test_a_nan_is_never_rounded() -> None:
    numbers = np.ones(5000, np.uint32)
    for index, bits in ((0, 0x7F800001), (4999, 0xFFFFFFFF), (2500, 0x7FC00000)):
        some = numbers.copy()
        some[index] = bits
        assert all(_native.cast_numbers(some, element, plain) is None for element in (2, 3) for plain in (False, True))


def test_where_nothing_follows_from_anything_files_are_the_same_as_without(tmp_path: Path) -> None:
    torch.manual_seed(4)
    state = {"m": {"a": torch.randn(300, 300), "b": torch.randn(300, 300), "c": torch.randn(300, 300).bfloat16()}}
    for name, engine in (("off", fs.EngineOptions()), ("derived", DERIVED)):
        with fs.Checkpointer(tmp_path / name, engine=engine) as checkpointer:
            checkpointer.save(1, state)
    files = [tmp_path / name / "step-00000001" / "rank-00000.safetensors" for name in ("off", "derived")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert fs.open(tmp_path / "derived").manifest.critical == ()


def test_what_stops_being_equal_is_listed_by_name_again(tmp_path: Path) -> None:
    state = sections()
    with fs.Checkpointer(tmp_path, engine=DERIVED, keep=None) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state).committed.result()
            for tensor in state["average"].values():
                tensor.mul_(0.5)
    assert "copies" in fs.open(tmp_path, 1).manifest.critical
    last = fs.open(tmp_path, 3)
    assert last.manifest.critical == ("delta", "codec.cast")
    assert "average.wide" in load_file(tmp_path / "step-00000003" / "rank-00000.safetensors")
    assert last.verify().sound


def test_what_rests_in_the_base_is_derived_from_bytes_that_lie_there(tmp_path: Path) -> None:
    state = sections()
    with fs.Checkpointer(tmp_path, engine=DERIVED, keep=1) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, state).committed.result()
            for tensor in state["moment"].values():
                tensor.mul_(2)
    last = fs.open(tmp_path, 4)
    own = sum(row.bytes for row in last.manifest.segments if row.home is None)
    assert own < 1.1 * sum(t.nbytes for t in state["moment"].values())
    for tensor in state["moment"].values():
        tensor.div_(2)
    into = blank(state)
    with fs.Checkpointer(tmp_path, engine=DERIVED) as checkpointer:
        checkpointer.load(into)
        assert content(into) == content(state)
        checkpointer.save(5, into)
    assert fs.open(tmp_path, 5).verify().sound
    assert torch.equal(fs.open(tmp_path, 5).read("model.wide"), state["model"]["wide"])


def halves_in_two_files(path: Path) -> dict[str, Tensors]:
    """Of one that is rounded, the first half's master rests in the base's file, and the second one's has changed."""
    state = {name: {"wide": sections()[name]["wide"]} for name in ("master", "model")}
    with fs.Checkpointer(path, engine=DERIVED, keep=1) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, state).committed.result()
            state["master"]["wide"].view(-1)[CHUNK_BYTES // 4 + 5] += 1
            state["model"]["wide"].copy_(state["master"]["wide"])
        checkpointer.save(5, state).committed.result()
    (base,) = (row for row in fs.open(path).manifest.segments if row.home is not None)
    assert base.bytes > CHUNK_BYTES
    return state


@pytest.mark.parametrize("files", [1, 2, 3])
def test_halves_that_lie_in_two_files_meet_however_few_may_be_open(tmp_path: Path, files: int) -> None:
    state = halves_in_two_files(tmp_path)
    with mock.patch("flowstone.store.local_io._files_max", return_value=files):
        assert loads(tmp_path, state)
        assert fs.open(tmp_path).verify().sound


def test_a_missing_file_is_a_finding_though_others_are_rounded_from_it(tmp_path: Path) -> None:
    halves_in_two_files(tmp_path)
    checkpoint = fs.open(tmp_path)
    (base,) = (row.name for row in checkpoint.manifest.segments if row.home is not None)
    (tmp_path / "step-00000005" / base).unlink()
    with pytest.raises(fs.DamagedError, match="is missing"):
        checkpoint.verify()


@pytest.mark.parametrize(("number", "is_told"), [(errno.EIO, True), (errno.EMFILE, False)])
def test_what_cannot_be_read_to_be_rounded_is_a_finding_or_an_error(run: Path, number: int, is_told: bool) -> None:
    """The first bytes that a check reads are those that chunks are rounded from."""
    left = [fs.StorageError("cannot read a master", errno=number)]

    def refuse(verb: str, path: str) -> fs.FlowstoneError | None:
        return left.pop() if verb == "read_through" and left else None

    checkpoint = fs.open(FaultInjectingStore(LocalStore(run), after=refuse))
    if is_told:
        assert [finding.what for finding in checkpoint.inspect().findings] == ["cannot read a master"]
    else:
        with pytest.raises(fs.StorageError, match="cannot read a master"):
            checkpoint.inspect()
    assert not left


def test_coded_masters_are_rounded_too(tmp_path: Path) -> None:
    state = sections()
    with fs.Checkpointer(tmp_path, engine=fs.EngineOptions(compress="max")) as checkpointer:
        checkpointer.save(1, state)
    into = blank(state)
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(into)
    assert content(into) == content(state)
    assert fs.open(tmp_path).manifest.critical == ("delta", "copies", "codec.planes", "codec.cast")
    fs.pack(tmp_path, tmp_path / "whole")
    assert torch.equal(fs.open(tmp_path / "whole").read("half.wide"), state["half"]["wide"])


def rounded_chunk(checkpoint: fs.Checkpoint) -> tuple[int, int]:
    """Number of a chunk that is rounded from two others, and of the first of these."""
    stored = checkpoint.index.chunks.stored
    assert stored is not None
    number = int(checkpoint.index.chunks.first[list(checkpoint.index.tensors.names).index("model.wide")])
    assert stored.codec[number] == CAST.id
    return number, int(stored.offset[number])


ways: dict[str, Callable[[Path], object]] = {
    "load": lambda run: fs.Checkpointer(run).load(blank(sections())),
    "read": lambda run: fs.open(run).read("model.wide"),
    "verify": lambda run: fs.open(run).verify(),
    "export": lambda run: fs.export(fs.open(run), run / "out", section="model"),
}


@pytest.mark.parametrize("way", ways)
def test_a_result_that_is_not_what_was_saved_is_damage(run: Path, way: str) -> None:
    number, _ = rounded_chunk(fs.open(run))
    edit_index(run / "step-00000001", lambda columns: columns["chunk.digest"].__setitem__(number, 1))
    with pytest.raises(fs.DamagedError) as caught:
        ways[way](run)
    assert "model.wide" in str(caught.value) or way == "read"


@pytest.mark.parametrize("way", ways)
def test_damage_of_what_others_are_rounded_from_is_found(run: Path, way: str) -> None:
    checkpoint = fs.open(run)
    _, source = rounded_chunk(checkpoint)
    stored = checkpoint.index.chunks.stored
    assert stored is not None
    file = checkpoint.manifest.segments[int(stored.segment[source])].name
    flip(run / "step-00000001" / file, int(stored.offset[source]) + 1000)
    with pytest.raises(fs.DamagedError):
        ways[way](run)


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (lambda c, row, source: c["chunk.offset"].__setitem__(row, len(c["chunk.offset"])), "do not exist"),
        (lambda c, row, source: c["chunk.offset"].__setitem__(row, 1 << 63), "do not exist"),
        (lambda c, row, source: c["chunk.offset"].__setitem__(row, source + 1), "not half as long"),
        (lambda c, row, source: c["chunk.offset"].__setitem__(row, row), "not half as long"),
        (lambda c, row, source: c["chunk.segment"].__setitem__(row, 1), "but has stored bytes"),
        (lambda c, row, source: c["chunk.bytes"].__setitem__(row, 8), "but has stored bytes"),
        (lambda c, i, source: (c["chunk.codec"].__setitem__(source, CAST.id), c["chunk.bytes"].__setitem__(source, 0)),
         "do not exist"),
        (lambda c, row, source: c["tensor.dtype"].__setitem__(slice(None), c["tensor.dtype"][::-1]), "contradicts"),
    ],
)
def test_what_the_index_claims_of_what_is_rounded_is_checked(
    run: Path, claim: Callable[[dict[str, np.ndarray], int, int], object], message: str
) -> None:
    position, source = rounded_chunk(fs.open(run))
    edit_index(run / "step-00000001", lambda columns: claim(columns, position, source))
    with pytest.raises(fs.DamagedError, match=message):
        _ = fs.open(run).tensors


@pytest.mark.parametrize(("left", "message"), [
    (["delta", "codec.cast"], "two pieces or chunks overlap in a file"), (["delta", "copies"], "unknown codec 4"),
])
def test_what_is_not_announced_is_refused(run: Path, left: list[str], message: str) -> None:
    edit_manifest(run / "step-00000001", lambda manifest: manifest.update(critical=left))
    with pytest.raises(fs.DamagedError, match=message):
        _ = fs.open(run).tensors


def test_a_copy_with_another_digest_than_what_it_is_a_copy_of_is_damage(run: Path) -> None:
    number = int(fs.open(run).index.chunks.first[list(fs.open(run).index.tensors.names).index("average.small")])
    edit_index(run / "step-00000001", lambda columns: columns["chunk.digest"].__setitem__(number, 1))
    with pytest.raises(fs.DamagedError, match="two pieces or chunks overlap in a file"):
        _ = fs.open(run).tensors


def test_numbers_of_chunks_follow_these_into_another_order() -> None:
    length, codec = np.array([5, 0, 9, 0], np.uint32), np.array([0, 4, 1, 4], np.uint8)
    forms = ChunkForms(length, codec, np.arange(4, dtype=np.uint64))
    places = ChunkPlaces(np.array([3, 2, 3, 2], np.uint32), np.array([40, 0, 50, 2], np.uint64), forms)
    actual = places.reorder(np.array([3, 2, 0, 1]))
    assert actual.offset.tolist() == [1, 50, 40, 2]
    assert actual.segment.tolist() == [0, 3, 3, 0]


TRAINING = """
import os, signal, sys, torch, flowstone as fs

def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4))).bfloat16()
    exact = {name: p.detach().float() for name, p in model.named_parameters()}
    master = {name: torch.nn.Parameter(p + 1e-3 * torch.randn(p.shape)) for name, p in exact.items()}
    optimizer = torch.optim.AdamW(list(master.values()), lr=1e-3)
    return model, master, optimizer

def train(model, master, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        for (name, p) in model.named_parameters():
            p.data.copy_(master[name].data)
        x = torch.randn(8, 256).bfloat16()
        model(x).float().pow(2).mean().backward()
        for name, p in model.named_parameters():
            master[name].grad = p.grad.float(); p.grad = None
        optimizer.step()
        for (name, p) in model.named_parameters():
            p.data.copy_(master[name].data)

if __name__ == "__main__":
    model, master, optimizer = made()
    saver = fs.Checkpointer(sys.argv[1], engine=fs.EngineOptions(compress="derived"))
    for step in range(1, 4):
        train(model, master, optimizer, [step])
        saver.save(step, {"model": model, "master": master, "optimizer": optimizer}).committed.result()
    saver.save(4, {"model": model, "master": master, "optimizer": optimizer})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_training_in_bfloat16_goes_on_bit_for_bit_from_12_of_14_bytes(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    ended = subprocess.run([sys.executable, script, tmp_path / "run"], check=False)
    assert ended.returncode == -9
    names: dict[str, object] = {"__name__": "training"}
    exec(compile(TRAINING, str(script), "exec"), names)
    made, train = names["made"], names["train"]
    assert callable(made)
    assert callable(train)
    model, master, optimizer = made()
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.load({"model": model, "master": master, "optimizer": optimizer}, step=3)
    train(model, master, optimizer, [4, 5])
    undisturbed = made()
    train(*undisturbed, [1, 2, 3, 4, 5])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), undisturbed[0].parameters(), strict=True))
    assert all(torch.equal(master[name], undisturbed[1][name]) for name in master)
    parameters = sum(p.numel() for p in model.parameters())
    assert 12 * parameters < stored_bytes(tmp_path / "run", 3) < 12.3 * parameters
    assert fs.open(tmp_path / "run", 3).verify().sound
