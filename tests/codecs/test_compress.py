"""Saves that encode: the result of every way to read, the contents of the files, the effect of damage."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import flowstone as fs
from flowstone import _native
from flowstone.config import CHUNK_BYTES
from flowstone.format.codec import PLANES
from flowstone.store.memory import MemoryStore
from forge import content, edit_index, edit_manifest, flip, stored_bytes

MAX = fs.EngineOptions(compress="max")


def state(*, filled: bool = True) -> dict[str, object]:
    """Tensors of every width, dense and strided, some too small to be encoded, some of which nothing is gained."""
    torch.manual_seed(3)
    tensors = {
        "single": torch.randn(1100, 700) * 0.02, "half": (torch.randn(800_001) * 0.02).bfloat16(),
        "double": torch.randn(70_000, dtype=torch.float64), "pairs": torch.randn(90_000, dtype=torch.complex64),
        "zeros": torch.zeros(600_000), "ids": torch.randint(0, 50_000, (200_000,)),
        "noise": torch.randint(0, 256, (150_000,), dtype=torch.uint8), "turned": torch.randn(500, 600).t(),
        "small": torch.randn(20), "none": torch.zeros(0),
    }
    if not filled:
        tensors = {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}
    return {"m": tensors, "step": 5 if filled else 0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with fs.Checkpointer(tmp_path / "run", engine=MAX) as checkpointer:
        checkpointer.save(1, state())
    return tmp_path / "run"


def test_a_coded_checkpoint_is_shorter_announced_and_loads_bit_for_bit(run: Path, tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "plain") as checkpointer:
        checkpointer.save(1, state())
    assert stored_bytes(run) < 0.75 * stored_bytes(tmp_path / "plain")
    assert fs.open(run).manifest.critical == ("delta", "codec.planes")
    assert fs.open(tmp_path / "plain").manifest.critical == ()
    into = state(filled=False)
    with fs.Checkpointer(run) as checkpointer:
        checkpointer.load(into)
        assert content(into) == content(state())
        into = state(filled=False)
        checkpointer.load(into, verify_first=True)
    assert content(into) == content(state())


def test_parts_of_coded_tensors_are_read_streamed_and_verified(run: Path) -> None:
    tensors, checkpoint = state()["m"], fs.open(run)
    assert isinstance(tensors, dict)
    assert torch.equal(checkpoint.read("m.single", box=fs.Box((371, 5), (9, 600))), tensors["single"][371:380, 5:605])
    assert torch.equal(checkpoint["m.half"][CHUNK_BYTES - 3 : CHUNK_BYTES + 3], tensors["half"][CHUNK_BYTES - 3 :][:6])
    assert all(torch.equal(tensor, tensors[name[2:]]) for name, tensor in checkpoint.stream())
    verified = checkpoint.verify()
    assert verified.sound
    assert verified.checked_bytes >= stored_bytes(run)


def test_a_coded_checkpoint_is_exported_and_equal_to_what_it_is_made_of(run: Path, tmp_path: Path) -> None:
    fs.export(fs.open(run), tmp_path / "out", section="m")
    values: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        values |= load_file(file)
    tensors = state()["m"]
    assert isinstance(tensors, dict)
    assert values.keys() == tensors.keys()
    assert all(torch.equal(values[name], tensor) for name, tensor in tensors.items())
    assert fs.diff(tmp_path / "out", fs.open(run), section="m", names="m.*").equal


def test_a_store_in_memory_holds_coded_chunks() -> None:
    store = MemoryStore(options=MAX)
    with fs.Checkpointer(store, engine=MAX) as checkpointer:
        checkpointer.save(1, state())
        into = state(filled=False)
        checkpointer.load(into)
    assert content(into) == content(state())


def test_a_coded_chunk_that_is_the_bases_is_not_stored_again(tmp_path: Path) -> None:
    changing = state()
    tensors = changing["m"]
    assert isinstance(tensors, dict)
    with fs.Checkpointer(tmp_path, engine=MAX) as checkpointer:
        for step in (1, 2, 3):
            tensors["double"] += 1
            checkpointer.save(step, changing).committed.result()
    rows = fs.open(tmp_path, 3).manifest.segments
    assert sum(row.bytes for row in rows if row.home is None) < 700_000
    assert [row.name[:5] for row in rows if row.home is not None] == ["from-"]
    assert torch.equal(fs.open(tmp_path, 3).read("m.single"), tensors["single"])
    assert torch.equal(fs.open(tmp_path, 3).read("m.double"), tensors["double"])
    assert fs.open(tmp_path, 3).verify().sound


def test_equal_chunks_of_a_few_bytes_do_not_keep_the_bases_file(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(300, 1000))
    moments = torch.zeros(40_000)
    with fs.Checkpointer(tmp_path, engine=MAX) as checkpointer:
        for step in (1, 2, 3):
            parameter.data += 1
            moments[:20_000] += 1
            checkpointer.save(step, {"p": parameter, "m": moments}).committed.result()
    assert all(row.home is None for row in fs.open(tmp_path, 3).manifest.segments)


def coded_chunk(checkpoint: fs.Checkpoint) -> tuple[int, int, int, Path]:
    """Number, offset, stored length and file of a coded chunk."""
    stored = checkpoint.index.chunks.stored
    assert stored is not None
    number = int(np.flatnonzero(stored.codec == PLANES.id)[1])
    file = Path(checkpoint.path) / checkpoint.manifest.segments[int(stored.segment[number])].name
    return number, int(stored.offset[number]), int(stored.length[number]), file


def test_a_flipped_bit_in_a_coded_chunk_is_found_before_it_is_decoded(run: Path) -> None:
    _, offset, length, file = coded_chunk(fs.open(run))
    flip(file, offset + length // 2)
    into = state(filled=False)
    with fs.Checkpointer(run) as checkpointer, pytest.raises(fs.DamagedError, match="not match their digest"):
        checkpointer.load(into)
    (finding,) = fs.open(run).inspect().findings
    assert finding.file == file.name


@pytest.mark.parametrize("way", ["load", "read", "verify", "export"])
def test_bytes_that_no_encoder_wrote_are_damage_though_their_digest_is_right(
    run: Path, tmp_path: Path, way: str
) -> None:
    number, offset, length, file = coded_chunk(fs.open(run))
    data = bytearray(file.read_bytes())
    data[offset] = 3  # no element has that length
    file.write_bytes(data)
    digest = _native.xxh3_64(data[offset : offset + length])
    edit_index(run / "step-00000001", lambda columns: columns["chunk.digest"].__setitem__(number, digest))
    checkpoint = fs.open(run)
    ways: dict[str, Callable[[], object]] = {
        "load": lambda: fs.Checkpointer(run).load(state(filled=False)), "read": lambda: dict(checkpoint.stream()),
        "verify": checkpoint.verify, "export": lambda: fs.export(checkpoint, tmp_path / "out", section="m"),
    }
    with pytest.raises(fs.DamagedError) as caught:
        ways[way]()
    assert re.search("not match (its|their) digest", str(caught.value))


@pytest.mark.parametrize(
    ("codec", "length", "message"),
    [
        (2, None, "unknown codec 2"), (0, None, "stored length"), (1, CHUNK_BYTES, "stored length"),
        (1, 0, "stored length"),
    ],
)
def test_what_the_index_claims_of_a_codec_is_checked(run: Path, codec: int, length: int | None, message: str) -> None:
    number = coded_chunk(fs.open(run))[0]

    def claim(columns: dict[str, np.ndarray]) -> None:
        columns["chunk.codec"][number] = codec
        if length is not None:
            columns["chunk.bytes"][number] = length

    edit_index(run / "step-00000001", claim)
    with pytest.raises(fs.DamagedError, match=message):
        _ = fs.open(run).tensors


def test_a_codec_that_is_not_announced_is_unknown(run: Path) -> None:
    edit_manifest(run / "step-00000001", lambda manifest: manifest.update(critical=["delta"]))
    with pytest.raises(fs.DamagedError, match="unknown codec 1"):
        _ = fs.open(run).tensors
    edit_manifest(run / "step-00000001", lambda manifest: manifest.update(critical=["delta", "codec.other"]))
    with pytest.raises(fs.UnsupportedFormatError, match=r"codec\.other"):
        fs.open(run)


def test_compress_is_one_of_its_names() -> None:
    assert fs.EngineOptions().compress == "off"
    with pytest.raises(fs.ArgumentError, match="compress 'zstd'"):
        fs.EngineOptions(compress="zstd")  # type: ignore[arg-type]


def test_whatever_is_encoded_is_decoded_and_any_other_bytes_are_refused() -> None:
    data = torch.randn(5000).numpy().tobytes()
    stored = _native.encode_planes(data, 4)
    assert stored is not None
    assert len(stored) < len(data)
    assert _native.decode_chunk(1, stored, len(data)) == data
    assert _native.decode_chunk(1, stored[:-1], len(data)) is None
    assert _native.decode_chunk(1, stored, len(data) - 4) is None
    assert _native.encode_planes(np.random.default_rng(0).bytes(5000), 4) is None
    for width, wrong in ((3, data), (8, data[:4]), (4, bytes(CHUNK_BYTES + 4))):
        with pytest.raises(ValueError, match="1 MiB at most"):
            _native.encode_planes(wrong, width)


def test_what_is_read_while_the_state_is_walked_is_decoded(tmp_path: Path) -> None:
    many: dict[str, object] = {f"{index}": torch.full((1024,), float(index)) for index in range(5000)}
    many["large"] = torch.randn(500_000)
    with fs.Checkpointer(tmp_path, engine=MAX) as checkpointer:
        checkpointer.save(1, {"m": many})
    into = {"m": {name: torch.zeros_like(tensor) for name, tensor in many.items()}}  # type: ignore[call-overload]
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(into)
    assert content(into) == content({"m": many})
