"""A checkpoint of every format version stays readable, with the values of its formula."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import plain_reader
import pytest
import torch

import flowstone as fs
from flowstone.format.objects import NamedConstant
from golden import make, make_delta, make_planes, make_provided
from strategies import assert_same, raw_bytes

GOLDEN = Path(make.__file__).parent
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name.startswith("v"))
CHECKPOINT = f"step-{make.STEP:08d}"


def flat(state: dict) -> dict[str, torch.Tensor]:
    """The tensors of a golden state under the names that a checkpoint gives them."""
    net, optimizer = state["model"], state["optimizer"]
    tensors = {f"model.{name}": value for name, value in net.state_dict().items()}
    paths = {id(value): f"model.{name}" for name, value in net.named_parameters()}
    for parameter, slots in optimizer.state.items():
        tensors |= {f"optimizer.state.{paths[id(parameter)]}.{slot}": value for slot, value in slots.items()}
    tensors |= {f"kinds.{name}": value for name, value in state["kinds"].items()}
    return tensors | {
        "empty": state["empty"], "table": state["table"], "array": state["array"],
        "own@0.noise": state["own"].value["noise"],
        "objects.long": np.frombuffer(state["objects"]["long"], np.uint8),
        "objects.long array": np.frombuffer(bytes(state["objects"]["long array"]), np.uint8),
    }


def tree_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_mtime_ns}\n".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def test_there_is_a_golden_checkpoint_of_every_version() -> None:
    from flowstone.config import FORMAT_VERSION

    assert [f"v{n}" for n in range(1, FORMAT_VERSION + 1)] == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoint_verifies(version: str) -> None:
    verified = fs.open(GOLDEN / version).verify()
    assert (verified.step, verified.sound, verified.extra) == (make.STEP, True, ())


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoint_loads_bit_for_bit(version: str) -> None:
    before = tree_digest(GOLDEN / version)
    state, expected = make.blank(), make.filled()
    with fs.Checkpointer(GOLDEN / version) as checkpointer:
        report = checkpointer.load(state)
    assert report.step == make.STEP
    actual = flat(state)
    for name, value in flat(expected).items():
        assert_same(actual[name], value, name)
    for name, value in expected["objects"].items():
        assert_same(state["objects"][name], value, name)
    assert list(state["objects"]) == list(expected["objects"])
    assert state["model"].head.weight is state["model"].embed.weight
    assert state["optimizer"].param_groups[0]["lr"] == 0.25
    assert (state["own"].value["seed"], state["step"]) == (7, make.STEP)
    assert tree_digest(GOLDEN / version) == before, "a load wrote into the store"


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoint_reads_tensor_by_tensor(version: str) -> None:
    checkpoint, expected = fs.open(GOLDEN / version), flat(make.filled())
    assert set(checkpoint.tensors) == set(expected)
    assert checkpoint.tensors["model.head.weight"].alias_of == "model.embed.weight"
    assert checkpoint.tensors["table"].pieces == 2
    for name, value in expected.items():
        actual = checkpoint.read(name)
        assert checkpoint.tensors[name].shape == tuple(value.shape), name
        assert np.array_equal(raw_bytes(actual), raw_bytes(value)), name
    assert checkpoint.objects["objects"]["dtype"] == NamedConstant("torch.dtype", "bfloat16")


@pytest.mark.parametrize("version", VERSIONS)
def test_plain_reader_reads_the_golden_checkpoint(version: str) -> None:
    tensors, objects, per_rank = plain_reader.read(GOLDEN / version / CHECKPOINT)
    expected = flat(make.filled())
    assert set(tensors) == set(expected)
    for name, value in expected.items():
        assert tensors[name].tobytes() == raw_bytes(value).tobytes(), name
    assert objects["step"] == make.STEP
    assert per_rank["own"][0]["seed"] == 7
    assert per_rank["own"][0]["noise"].tobytes() == tensors["own@0.noise"].tobytes()
    kept, whole = objects["objects"], make.objects()
    for name in set(whole) - {"nan", "dtype", "device", "size", "numpy", "deque"}:
        assert kept[name] == whole[name], name
    assert (kept["dtype"], kept["device"], kept["size"], kept["numpy"]) == ("bfloat16", "cuda:1", "2,3", "int16")
    assert np.float64(kept["nan"]).tobytes() == np.float64(whole["nan"]).tobytes()
    assert kept["deque"] == [1, 2]


def test_todays_writer_names_version_1(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)})
    manifest = json.loads((store / "step-00000001/manifest.json").read_bytes())
    assert (manifest["flowstone"], manifest["critical"]) == (1, [])
    assert json.loads((store / "flowstone.json").read_bytes())["flowstone"] == 1


def test_what_an_earlier_writer_did_not_record_of_its_io_is_none() -> None:
    io = fs.open(GOLDEN / "v1").manifest.io
    assert (io.workers, io.requests, io.origin, io.explicit) == (None, None, None, None)
    assert io.request_bytes > 0


def test_todays_writer_records_all_of_its_io(store: Path) -> None:
    with fs.Checkpointer(store, engine=fs.EngineOptions(queue_depth=4)) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)})
    io = json.loads((store / "step-00000001/manifest.json").read_bytes())["io"]
    assert set(io) == set(fs.open(store).manifest.io.__struct_fields__)
    assert (io["queue_depth"], io["origin"], io["explicit"]) == (4, "default", ["queue_depth"])
    assert io["requests"] >= 1


def test_golden_checkpoints_stay_small() -> None:
    for version in VERSIONS:
        assert sum(path.stat().st_size for path in (GOLDEN / version).rglob("*")) < 300_000


PROVIDED = GOLDEN / "provided-1"


def test_what_providers_said_loads_bit_for_bit() -> None:
    before = tree_digest(PROVIDED)
    state, expected = make_provided.blank(), make_provided.filled()
    with (
        fs.register_provider(make_provided.Reel, make_provided.ReelProvider()),
        fs.Checkpointer(PROVIDED) as checkpointer,
    ):
        checkpointer.load(state)
    mine, theirs = state["w"]["q"], expected["w"]["q"]
    assert_same(mine.codes, theirs.codes)
    assert_same(mine.scale, theirs.scale)
    reel, whole = state["reel"][0], expected["reel"][0]
    assert_same(np.concatenate(reel.blocks), np.concatenate(whole.blocks))
    assert_same(reel.lasts, whole.lasts)
    assert (reel.at, state["step"]) == (whole.at, make.STEP)
    assert tree_digest(PROVIDED) == before, "a load wrote into the store"


def test_plain_reader_reads_what_providers_said() -> None:
    tensors, objects, _ = plain_reader.read(PROVIDED / CHECKPOINT)
    assert set(tensors) == {"w.q.codes", "w.q.scale", "reel.0.frames", "reel.0.lasts"}
    reel, split = objects["reel"][0], objects["w"]["q"]
    assert (reel["$provided"], reel["objects"]) == ("reel", {"at": {"frame": 3, "cut": (1, 2)}, "rate": 24})
    assert reel["parts"]["frames"].tolist() == np.arange(15).reshape(5, 3).tolist()
    assert split["$provided"] == split["objects"]["outer"]["type"] == "quantised.RowInt8"
    assert split["objects"]["outer"]["shape"] == (4, 3)


PLANES = GOLDEN / "planes-1"


def test_the_golden_checkpoint_with_planes_is_read_and_written_again_alike(tmp_path: Path) -> None:
    expected, checkpoint = make_planes.state(), fs.open(PLANES)
    assert checkpoint.manifest.critical == ("delta", "codec.planes")
    assert checkpoint.verify().sound
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in expected.items())
    tensors, _, _ = plain_reader.read(PLANES / CHECKPOINT)
    assert all(np.array_equal(tensors[name], tensor.numpy()) for name, tensor in expected.items())
    into = {name: torch.ones_like(tensor) for name, tensor in expected.items()}
    with fs.Checkpointer(tmp_path, engine=fs.EngineOptions(compress="max")) as checkpointer:
        again = checkpointer.save(make.STEP, expected).committed.result()
        checkpointer.load(into)
    assert again.index.chunks.digest.tolist() == checkpoint.index.chunks.digest.tolist(), "the same stored bytes"


DELTA = GOLDEN / "delta-1"


def test_a_delta_loads_bit_for_bit() -> None:
    before = tree_digest(DELTA)
    assert fs.open(DELTA).verify().extra == ()
    assert fs.open(DELTA).manifest.critical == ("delta",)
    expected = make_delta.state(make_delta.STEP)
    actual = make_delta.state(99)
    actual["m"]["rests"].fill_(0)
    with fs.Checkpointer(DELTA) as checkpointer:
        checkpointer.load(actual)
    assert actual["step"] == make_delta.STEP
    for name, value in expected["m"].items():
        assert_same(actual["m"][name], value, name)
    assert tree_digest(DELTA) == before, "a load wrote into the store"


def test_plain_reader_reads_a_delta() -> None:
    tensors, objects, _ = plain_reader.read(DELTA / f"step-{make_delta.STEP:08d}")
    assert objects["step"] == make_delta.STEP
    expected = make_delta.state(make_delta.STEP)["m"]
    assert set(tensors) == {f"m.{name}" for name in expected}
    for name, value in expected.items():
        assert tensors[f"m.{name}"].tobytes() == raw_bytes(value).tobytes(), name


def test_the_golden_delta_is_stored_in_all_the_ways_that_there_are() -> None:
    """In a segment of its own, in one of chunks, and in a file of an earlier save; one tensor in two of these."""
    checkpoint = fs.open(DELTA)
    homes = [row.home is None for row in checkpoint.manifest.segments]
    chunks = checkpoint.index.chunks
    assert chunks.stored is not None
    assert set(chunks.stored.segment.tolist()) == {0, 1, 2}
    assert sorted(homes) == [False, True, True]
    assert (chunks.extents()[0] == -1).any()
