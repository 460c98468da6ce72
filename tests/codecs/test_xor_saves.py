"""Saves that encode the difference from a chunk's base: every way to read, damage, links."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import flowstone as fs
from flowstone import _native
from flowstone.config import CHUNK_BYTES, MIB
from flowstone.format.codec import CAST, PLANES, RAW, XOR
from flowstone.store.engines import EngineChoice
from flowstone.store.local_io import LocalReadHandle
from forge import content, edit_index, flip
from lora_job import SMALL_BYTES, Job, fresh_load

KEEPS = fs.EngineOptions(compress="max", kept_bytes=64 * MIB)


class Drift:
    """A state whose numbers change a little with each step, but for some that stay."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.random = torch.Generator().manual_seed(1)
        self.tensors = {
            "single": torch.randn(1100, 700) * 0.02, "half": (torch.randn(800_001) * 0.02).bfloat16(),
            "turned": (torch.randn(500, 600) * 0.02).t(), "still": torch.randn(100_000), "small": torch.randn(20),
            "noise": torch.randint(0, 1 << 60, (50_000,)),
        }

    def step(self) -> dict[str, object]:
        for name in ("single", "turned"):
            change = 1 + 1e-4 * torch.randn(self.tensors[name].shape, generator=self.random)
            self.tensors[name] *= change
        self.tensors["half"].view(torch.int16)[::37] ^= 1
        return {"m": self.tensors, "step": 1}


def blank() -> dict[str, object]:
    return {"m": {name: torch.full_like(tensor, 7) for name, tensor in Drift().tensors.items()}, "step": 0}


def codecs(checkpoint: fs.Checkpoint) -> dict[str, set[int]]:
    """Of each tensor, those of its chunks."""
    index = checkpoint.index
    codecs: dict[str, set[int]] = {}
    pieces, _ = index.chunks.locate(np.arange(len(index.chunks.digest)))
    for piece, codec in zip(pieces, index.chunks.codecs(), strict=True):
        codecs.setdefault(index.tensors.names[index.pieces.tensor[piece]], set()).add(int(codec))
    return codecs


def written(checkpoint: fs.Checkpoint) -> int:
    return sum(row.bytes for row in checkpoint.manifest.segments if row.home is None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps, of which the last two have chunks with a base; the first one is removed, as `keep` says."""
    drift = Drift()
    with fs.Checkpointer(tmp_path / "run", engine=KEEPS, keep=fs.Keep(last=2)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, drift.step()).committed.result()
    return tmp_path / "run"


def now() -> dict[str, object]:
    drift = Drift()
    drift.step()
    drift.step()
    return drift.step()


def test_what_changes_a_little_is_coded_with_what_it_was_and_loads_bit_for_bit(run: Path, tmp_path: Path) -> None:
    checkpoint = fs.open(run)
    assert checkpoint.manifest.critical == ("delta", "codec.xor")
    result = codecs(checkpoint)
    assert result["m.single"] == result["m.half"] == result["m.turned"] == result["m.still"] == {XOR.id}
    assert result["m.small"] == {RAW.id}
    with fs.Checkpointer(tmp_path / "planes", engine=fs.EngineOptions(compress="max")) as checkpointer:
        checkpointer.save(1, now())
    assert written(checkpoint) < 0.6 * written(fs.open(tmp_path / "planes"))
    assert not (run / "step-00000001").exists(), "its file lives in the others"
    for verify_first in (False, True):
        into = blank()
        with fs.Checkpointer(run) as checkpointer:
            checkpointer.load(into, verify_first=verify_first)
        assert content(into) == content(now())


@pytest.mark.parametrize("files", [1, 2, 3])
def test_however_few_files_may_be_open_a_chunk_and_its_base_are_read_together(run: Path, files: int) -> None:
    with mock.patch("flowstone.store.local_io._files_max", return_value=files):
        for verify_first in (False, True):
            into = blank()
            with fs.Checkpointer(run) as checkpointer:
                checkpointer.load(into, verify_first=verify_first)
            assert content(into) == content(now())
        assert fs.open(run).verify().sound
        base = max((run / "step-00000003").glob("*.safetensors"), key=lambda path: path.stat().st_size)
        flip(base, base.stat().st_size // 2)
        with pytest.raises(fs.DamagedError):
            fs.open(run).verify()
        with fs.Checkpointer(run) as checkpointer, pytest.raises(fs.DamagedError):
            checkpointer.load(blank())


def test_descriptors_that_others_have_taken_leave_no_chunk_without_its_base(run: Path) -> None:
    """Three files: one by itself, and two that have to be open together."""
    real = LocalReadHandle._open

    def load(available_bytes: int) -> dict[str, object]:
        into, held = blank(), list[LocalReadHandle]()

        def scarce(engines: EngineChoice, *rest: Any) -> tuple[int, int]:
            if held and len(held[-1]._opened) >= available_bytes:
                raise fs.StorageError("too many", errno=errno.EMFILE)
            return opens(engines, *rest)

        def noted(reading: LocalReadHandle) -> None:
            held.append(reading)
            real(reading)

        opens = EngineChoice.open_to_read
        with (
            mock.patch.object(EngineChoice, "open_to_read", scarce), mock.patch.object(LocalReadHandle, "_open", noted),
            fs.Checkpointer(run) as checkpointer,
        ):
            checkpointer.load(into)
        assert len(held) == 2, "all were open at once"
        return into

    assert content(load(2)) == content(now())
    with pytest.raises(fs.StorageError, match="too many"):
        load(1)


def test_what_is_kept_of_one_layout_is_let_go_of_before_anything_is_of_another(tmp_path: Path) -> None:
    """Saves under way hold what was kept by the plan before."""
    made, real, drift = list[_native.BaseCache](), _native.BaseCache, Drift()

    def noted(chunks: int, *, budget_bytes: int) -> _native.BaseCache:
        made.append(real(chunks, budget_bytes=budget_bytes))
        return made[-1]

    with mock.patch.object(_native, "BaseCache", noted), fs.Checkpointer(tmp_path, engine=KEEPS) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, drift.step()).committed.result()
        assert made[0].bytes > 0
        drift.tensors["more"] = torch.randn(500_000)
        for step in (3, 4):
            checkpointer.save(step, drift.step()).committed.result()
    assert [arena.bytes > 0 for arena in made] == [False, True]
    assert [arena.budget_bytes for arena in made] == [0, KEEPS.kept_bytes]
    assert not made[0].digests.any()


def test_parts_are_read_streamed_verified_exported_and_compared(run: Path, tmp_path: Path) -> None:
    tensors, checkpoint = now()["m"], fs.open(run)
    assert isinstance(tensors, dict)
    assert torch.equal(checkpoint.read("m.single", box=fs.Box((371, 5), (9, 600))), tensors["single"][371:380, 5:605])
    edge = CHUNK_BYTES // 2
    assert torch.equal(checkpoint["m.half"][edge - 3 : edge + 3], tensors["half"][edge - 3 : edge + 3])
    assert all(torch.equal(tensor, tensors[name[2:]]) for name, tensor in checkpoint.stream())
    assert checkpoint.verify().sound
    fs.export(checkpoint, tmp_path / "out", section="m")
    values: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        values |= load_file(file)
    assert all(torch.equal(values[name], tensor) for name, tensor in tensors.items())
    assert fs.diff(tmp_path / "out", checkpoint, section="m", names="m.*").equal
    assert fs.diff(checkpoint, fs.open(run)).equal
    assert not fs.diff(checkpoint, fs.open(run, 2)).equal
    fs.pack(checkpoint, tmp_path / "whole")
    assert fs.open(tmp_path / "whole").manifest.critical == ()
    assert all(torch.equal(fs.open(tmp_path / "whole").read(f"m.{name}"), tensor) for name, tensor in tensors.items())


def test_a_step_is_whole_in_its_directory_alone(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-00000003", tmp_path / "alone" / "step-00000003")
    shutil.rmtree(run)
    into = blank()
    with fs.Checkpointer(tmp_path / "alone") as checkpointer:
        checkpointer.load(into)
    assert content(into) == content(now())


def near_chunk(checkpoint: fs.Checkpoint) -> tuple[int, Path, int]:
    """Number of a chunk with a base, and that one's file and offset."""
    stored = checkpoint.index.chunks.stored
    assert stored is not None
    assert stored.bases is not None
    number = int(np.flatnonzero(stored.codec == XOR.id)[0])
    file = Path(checkpoint.path) / checkpoint.manifest.segments[int(stored.bases.segment[number])].name
    return number, file, int(stored.bases.offset[number])


def ways(run: Path, out: Path) -> dict[str, Callable[[], object]]:
    checkpoint = fs.open(run)
    return {
        "load": lambda: fs.Checkpointer(run).load(blank()), "read": lambda: dict(checkpoint.stream()),
        "verify": checkpoint.verify, "export": lambda: fs.export(checkpoint, out, section="m"),
    }


@pytest.mark.parametrize("way", ["load", "read", "verify", "export"])
def test_a_base_that_is_damaged_is_damage(run: Path, tmp_path: Path, way: str) -> None:
    _, file, offset = near_chunk(fs.open(run))
    flip(file, offset + 1000)
    with pytest.raises(fs.DamagedError, match=r"not match (its|their) digest"):
        ways(run, tmp_path / "out")[way]()


@pytest.mark.parametrize("way", ["load", "read", "verify", "export"])
def test_data_that_is_not_what_was_saved_is_damage_though_stored_bytes_are_right(
    run: Path, tmp_path: Path, way: str
) -> None:
    number = near_chunk(fs.open(run))[0]
    edit_index(run / "step-00000003", lambda columns: columns["chunk.data_digest"].__setitem__(number, 5))
    with pytest.raises(fs.DamagedError, match=r"not match (its|their) digest"):
        ways(run, tmp_path / "out")[way]()


def test_a_base_that_is_missing_or_swapped_is_damage(run: Path) -> None:
    number, file, _ = near_chunk(fs.open(run))

    def swap(columns: dict[str, np.ndarray]) -> None:
        other = int(np.flatnonzero(columns["chunk.codec"] == XOR.id)[1])
        for name in ("offset", "bytes", "codec", "digest", "segment"):
            column = columns[f"chunk.base_{name}"]
            column[number] = column[other]

    whole = (run / "step-00000003" / "index.safetensors").read_bytes()
    edit_index(run / "step-00000003", swap)
    with pytest.raises(fs.DamagedError):
        dict(fs.open(run).stream())
    assert whole != (run / "step-00000003" / "index.safetensors").read_bytes()
    file.unlink()
    with pytest.raises(fs.FlowstoneError):
        dict(fs.open(run).stream())


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("base_codec", XOR.id, "neither raw nor planes"), ("base_codec", RAW.id, "stored length is impossible"),
        ("base_bytes", 0, "stored length is impossible"), ("base_bytes", CHUNK_BYTES, "stored length is impossible"),
        ("base_segment", 77, "base of a chunk lies in a"), ("base_offset", 5, "base of a chunk lies outside"),
        ("base_offset", 1 << 63, "base of a chunk lies outside"),
    ],
)
def test_what_the_index_claims_of_a_base_is_checked(run: Path, column: str, value: int, message: str) -> None:
    number = near_chunk(fs.open(run))[0]
    edit_index(run / "step-00000003", lambda columns: columns[f"chunk.{column}"].__setitem__(number, value))
    with pytest.raises(fs.DamagedError, match=message):
        _ = fs.open(run).tensors


def test_a_budget_keeps_as_much_as_fits_and_the_rest_is_stored_by_itself(tmp_path: Path) -> None:
    drift = Drift()
    options = fs.EngineOptions(compress="max", kept_bytes=4 * MIB)
    with fs.Checkpointer(tmp_path, engine=options) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, drift.step()).committed.result()
    collected = set().union(*codecs(fs.open(tmp_path)).values())
    assert collected >= {XOR.id, PLANES.id}
    into = blank()
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(into)
    assert content(into) == content({"m": drift.tensors, "step": 1})
    with pytest.raises(fs.ArgumentError, match="kept_bytes"):
        fs.EngineOptions(kept_bytes=-1)


def test_a_base_is_renewed_when_chunks_have_drifted_from_it(tmp_path: Path) -> None:
    torch.manual_seed(2)
    tensor, collected = torch.randn(262_144) * 0.02, []
    with fs.Checkpointer(tmp_path, engine=KEEPS) as checkpointer:
        for step in range(1, 25):
            tensor *= 1 + 2e-3 * torch.randn(tensor.shape)
            checkpointer.save(step, {"m": {"w": tensor}}).committed.result()
            collected.append(codecs(fs.open(tmp_path, step))["m.w"].pop())
            assert torch.equal(fs.open(tmp_path, step).read("m.w"), tensor)
    assert collected[0] == PLANES.id
    assert collected[1] == XOR.id
    assert PLANES.id in collected[2:], "it is written anew at times"
    assert collected.count(XOR.id) > collected.count(PLANES.id)


def test_what_was_kept_for_a_save_that_failed_is_no_base(tmp_path: Path) -> None:
    drift = Drift()
    with fs.Checkpointer(tmp_path, engine=KEEPS) as checkpointer:
        checkpointer.save(1, drift.step()).committed.result()
        shutil.rmtree(tmp_path / "step-00000001")
        checkpointer.save(2, drift.step()).committed.result()
        assert XOR.id not in set().union(*codecs(fs.open(tmp_path, 2)).values()), "its base is gone"
        checkpointer.save(3, drift.step()).committed.result()
    into = blank()
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(into)
    assert fs.open(tmp_path, 3).verify().sound
    assert torch.equal(fs.open(tmp_path, 3).read("m.single"), drift.tensors["single"])


def test_kept_chunks_count_what_they_hold() -> None:
    kept = _native.BaseCache(3, budget_bytes=10)
    assert (kept.budget_bytes, kept.bytes, kept.digests.tolist()) == (10, 0, [0, 0, 0])


def test_the_first_save_after_a_restart_refers_to_what_an_earlier_process_has_encoded(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        job = Job(tmp_path, engine=fs.EngineOptions(compress="max", kept_bytes=64 * MIB))
        if step > 1:
            job.checkpointer.load(job.state)
        job.save(step)
        job.checkpointer.close()
        assert (job.written[-1] < SMALL_BYTES) == (step > 1)
    checkpoint = fs.open(tmp_path, 3)
    assert codecs(checkpoint)["model.base.0.weight"] == {PLANES.id}
    assert checkpoint.verify().sound
    assert content(fresh_load(tmp_path, 3)) == content(job.state)


def test_chunks_with_a_base_are_referred_to_after_a_restart(tmp_path: Path) -> None:
    drift, frozen = Drift(), torch.nn.Parameter(torch.randn(300_000), requires_grad=False)
    with fs.Checkpointer(tmp_path, engine=KEEPS) as checkpointer:
        for step in (1, 2):
            with torch.no_grad():
                frozen[::50] *= 1.0001
            checkpointer.save(step, {**drift.step(), "p": frozen}).committed.result()
    assert codecs(fs.open(tmp_path))["p"] == {XOR.id}
    into = {**blank(), "p": torch.nn.Parameter(torch.zeros(300_000), requires_grad=False)}
    with fs.Checkpointer(tmp_path, engine=KEEPS) as checkpointer:
        checkpointer.load(into)
        checkpointer.save(3, into).committed.result()
        again = {**blank(), "p": torch.zeros(300_000)}
        checkpointer.load(again, step=3)
    assert torch.equal(again["p"], frozen)  # type: ignore[arg-type]
    assert fs.open(tmp_path, 3).verify().sound


def test_weights_are_rounded_from_a_master_copy_that_has_a_base(tmp_path: Path) -> None:
    torch.manual_seed(8)
    master = torch.randn(700_000) * 0.02
    with fs.Checkpointer(tmp_path / "run", engine=KEEPS) as checkpointer:
        for step in (1, 2, 3):
            master *= 1 + 1e-4 * torch.randn(master.shape)
            state = {"m": {"master": master, "weight": master.bfloat16()}}
            checkpointer.save(step, state).committed.result()
        into = {"m": {"master": torch.zeros(700_000), "weight": torch.zeros(700_000).bfloat16()}}
        checkpointer.load(into)
    assert content(into) == content(state)
    checkpoint = fs.open(tmp_path / "run")
    assert codecs(checkpoint) == {"m.master": {XOR.id}, "m.weight": {CAST.id}}
    assert torch.equal(checkpoint["m.weight"][300_000:300_010], state["m"]["weight"][300_000:300_010])
    assert checkpoint.verify().sound
    fs.pack(checkpoint, tmp_path / "whole")
    assert torch.equal(fs.open(tmp_path / "whole").read("m.weight"), state["m"]["weight"])
    _, file, offset = near_chunk(checkpoint)
    flip(file, offset + 1000)
    with pytest.raises(fs.DamagedError, match=r"not match (its|their) digest"):
        fs.open(tmp_path / "run").read("m.weight")
