"""The composition of checkpoints, and the space that removing them frees, on the command line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import flowstone as fs
from flowstone.cli import app
from flowstone.config import MIB
from flowstone.journal import journals
from flowstone.store.local import LocalStore
from journaled import Training
from journaled import run as train
from lora_job import BASE_BYTES, SMALL_BYTES, Job


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def told(*arguments: object) -> dict[str, object]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    record: dict[str, object] = json.loads(done.stdout)
    return record


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three steps of which the base is written in the first."""
    job = Job(tmp_path / "run")
    for step in (1, 2, 3):
        job.save(step)
    job.checkpointer.close()
    return tmp_path / "run"


def test_ls_tells_a_steps_own_size_beside_its_whole_size(store: Path) -> None:
    rows = told("ls", store)["checkpoints"]
    assert [row["own_bytes"] == row["bytes"] for row in rows] == [True, False, False]
    for row in rows[1:]:
        assert row["bytes"] > BASE_BYTES
        own = [path for path in Path(row["directory"]).iterdir() if not path.name.startswith(("from-", "manifest"))]
        assert row["own_bytes"] == sum(path.stat().st_size for path in own)
    lines = [line for line in run("ls", store).stdout.splitlines() if " ok " in line]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines]
    assert cells[0][3] == cells[0][4]
    assert ("MB" in cells[2][3], "kB" in cells[2][4]) == (True, True)


def test_show_tells_what_each_section_has_written_and_refers_to(store: Path) -> None:
    first = fs.open(store, 1).manifest.id
    sections = {section["section"]: section for section in told("show", store)["sections"]}
    assert set(sections) == {"model", "optimizer"}
    assert told("show", store)["io"]["compress"] is None
    assert "compress" not in run("show", store).stdout
    model = sections["model"]
    assert model["referred"] == {first: BASE_BYTES}
    assert model["bytes"] == model["written"] + BASE_BYTES
    assert sections["optimizer"]["referred"] == {}
    assert sections["optimizer"]["written"] == sections["optimizer"]["bytes"]
    assert model["codecs"] == model["coded"] == {"raw": model["bytes"]}
    assert (model["ratio"], model["ratios"]) == (1.0, {"raw": 1.0})
    files = {file["name"]: file["home"] for file in told("show", store)["files"] if "home" in file}
    assert set(files.values()) == {None, first}
    line = next(line for line in run("show", store).stdout.splitlines() if line.startswith("│ model "))
    assert "12.6 MB in 1 earlier save(s)" in line


def test_sections_are_told_without_a_byte_of_data(store: Path) -> None:
    for path in store.glob("step-*/*rank-*"):
        os.truncate(path, 0)
    sections = fs.open(store).sections
    assert [section.section for section in sections] == ["model", "optimizer"]
    assert sum(section.stored for section in sections) == fs.open(store).manifest.data_bytes


def test_sections_are_told_of_what_each_rank_has_and_of_names_with_dots(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "a.b": {"c": torch.ones(5)}, "own": fs.PerRank({"t": torch.ones(7)}), "n": 3}
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state)
    actual = {part.section: (part.tensors, part.bytes, part.written) for part in fs.open(tmp_path / "run").sections}
    assert actual == {"a": (1, 12, 12), "a.b": (1, 20, 20), "own@0": (1, 28, 28)}


def test_nothing_is_made_up_of_nothing(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"n": 1, "e": torch.zeros(0)})
    (row,) = fs.open(tmp_path / "run").sections
    assert (row.section, row.tensors, row.bytes, row.stored, row.ratio, row.codecs) == ("e", 1, 0, 0, 1.0, {})
    assert run("show", tmp_path / "run").exit_code == 0


def allocated(*paths: Path) -> int:
    """Of all files, each once whatever its names."""
    files = (file for path in paths for file in path.rglob("*") if file.is_file())
    return sum({file.stat().st_ino: file.stat().st_blocks * 512 for file in files}.values())


def test_du_tells_what_removing_frees(store: Path) -> None:
    result = told("du", store)
    steps = {step["step"]: step for step in result["steps"]}
    assert result["bytes"] == allocated(store)
    assert list(steps) == [1, 2, 3]
    for step in steps.values():
        assert step["bytes"] > BASE_BYTES
        assert 0 < step["alone_bytes"] < SMALL_BYTES, "the base's file stays, whichever step is removed"
    assert steps[2]["up_to_bytes"] == steps[1]["alone_bytes"] + steps[2]["alone_bytes"]
    assert steps[3]["up_to_bytes"] > BASE_BYTES
    assert steps[3]["up_to_bytes"] + result["other_bytes"] == result["bytes"]


@pytest.mark.parametrize("steps", [[1], [1, 2], [2, 3], [1, 2, 3]])
def test_du_foretells_what_a_removal_frees(store: Path, steps: list[int]) -> None:
    options = [part for step in steps for part in ("--step", step)]
    freed = told("du", store, *options)["removing"]
    assert freed["steps"] == steps
    before = allocated(store)
    for step in steps:
        shutil.rmtree(store / f"step-{step:08d}")
    assert before - allocated(store) == freed["freed_bytes"]


def test_du_does_not_promise_what_a_name_elsewhere_keeps(store: Path, tmp_path: Path) -> None:
    shared = max((store / "step-00000003").glob("from-*"), key=lambda path: path.stat().st_size)
    os.link(shared, tmp_path / "mine")
    assert told("du", store, "--step", 1, "--step", 2, "--step", 3)["removing"]["freed_bytes"] < 5 * SMALL_BYTES


def test_du_counts_what_is_in_no_step(store: Path) -> None:
    before = told("du", store)["other_bytes"]
    (store / ".saving-00000009-dead").mkdir()
    (store / ".saving-00000009-dead/rank-00000.safetensors").write_bytes(bytes(MIB))
    after = told("du", store)
    assert after["other_bytes"] - before == MIB
    assert "outside steps" in run("du", store).stdout


def test_du_tells_of_a_directory_that_cannot_be_listed_and_of_none_that_is_not_ours(store: Path) -> None:
    too_deep(store / "lost+found")
    before = told("du", store)
    too_deep(store / "step-00000001" / "deep")
    assert told("ls", store), "nothing else looks there"
    done = run("du", store)
    assert done.exit_code == 2
    assert "File name too long" in done.stderr
    shutil.rmtree(store / "step-00000001" / "deep")
    assert told("du", store) == before


def too_deep(place: Path) -> None:
    """Make a directory, and so many below it that the last one cannot be named by its path."""
    place.mkdir()
    fd = os.open(place, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=fd)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def test_du_is_a_table_for_people(store: Path) -> None:
    shown = run("du", store, "--step", 1).stdout
    assert "shared files counted once" in shown
    assert "removing 1 step(s) frees" in shown
    done = run("du", store, "--step", 9)
    assert done.exit_code == 2
    assert "the store has no checkpoint of step 9" in done.stderr
    for path in (store / "nowhere", store / "step-00000001"):
        done = run("du", path)
        assert done.exit_code == 2
        assert done.stderr.startswith("NotAStoreError")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A store with one checkpoint, after which four steps are in its journal."""
    train(Training(width=16), tmp_path / "run", 1, 5)
    return tmp_path / "run"


def test_show_tells_of_the_journal_that_leads_on(journal: Path) -> None:
    (row,) = told("show", journal, "--step", 1)["journals"]
    (name,) = (path.name for path in journal.glob("journal-*"))
    size = (journal / name / "rank-00000.journal").stat().st_size
    assert (row["name"], row["ranks"], row["first"], row["last"], row["frames"]) == (name, 1, 2, 5, 4)
    assert 0 < row["bytes"] <= size
    assert f"{name} replays steps 2 to 5: 4 frame(s) of 1 rank(s)" in " ".join(run("show", journal).stdout.split())
    os.truncate(journal / name / "rank-00000.journal", row["bytes"] - 1)
    (torn,) = told("show", journal, "--step", 1)["journals"]
    assert (torn["last"], torn["frames"]) == (4, 3)
    os.truncate(journal / name / "rank-00000.journal", 100)
    assert told("show", journal, "--step", 1)["journals"] == []


def test_show_tells_of_journals_that_go_on_from_one_and_of_none_of_another_checkpoint(journal: Path) -> None:
    with fs.Checkpointer(journal) as checkpointer:
        checkpointer.rewind(3)
    first, then = told("show", journal, "--step", 1)["journals"]
    assert (first["first"], first["last"]) == (2, 5)
    assert (then["first"], then["last"], then["frames"]) == (None, None, 0)
    assert f"{then['name']} has no step yet" in " ".join(run("show", journal).stdout.split())
    shutil.copytree(journal / "step-00000001", journal.parent / "alone")
    assert told("show", journal.parent / "alone")["journals"] == []
    with fs.Checkpointer(journal.parent / "other") as checkpointer:
        checkpointer.save(1, {"n": 1})
    for path in journal.glob("journal-*"):
        shutil.copytree(path, journal.parent / "other" / path.name)
    assert told("show", journal.parent / "other")["journals"] == []


def test_du_tells_what_journals_take_and_the_next_whole_save_frees_it(journal: Path) -> None:
    result = told("du", journal)
    (row,) = result["steps"]
    taken = allocated(*journal.glob("journal-*"))
    assert result["journal_bytes"] == row["journal_bytes"] == taken > 0
    assert row["bytes"] + taken + result["other_bytes"] == result["bytes"] == allocated(journal)
    assert "in journals, which the next full save frees" in run("du", journal).stdout
    with fs.Checkpointer(journal) as checkpointer:
        checkpointer.save(6, {"n": 1})
    after = told("du", journal)
    assert after["journal_bytes"] == 0
    assert not list(journal.glob("journal-*"))
    assert "in journals" not in run("du", journal).stdout


def test_show_says_why_a_save_has_encoded_what_it_has(tmp_path: Path) -> None:
    state = {"m": torch.randn(300_000)}
    with fs.Checkpointer(tmp_path, engine=fs.EngineOptions(compress="auto")) as checkpointer:
        for step in (1, 2):
            state["m"] += 1
            checkpointer.save(step, state).committed.result()
    first, second = (run("show", tmp_path, "--step", step).stdout for step in (1, 2))
    assert "\ncompress auto: no save has been measured yet\n" in first
    assert "compress auto: the device takes " in second
    assert told("show", tmp_path)["io"]["compress"] == fs.open(tmp_path).manifest.io.compress


def test_show_tells_the_ratio_of_each_section_by_codec(tmp_path: Path) -> None:
    torch.manual_seed(0)
    master = torch.randn(1 << 18)
    state = {"a": {"master": master, "noise": torch.randint(256, (MIB,), dtype=torch.uint8), "w": master.bfloat16()},
             "b": torch.arange(5)}
    with fs.Checkpointer(tmp_path, engine=fs.EngineOptions(compress="max")) as checkpointer:
        checkpointer.save(1, state)
    a, b = told("show", tmp_path)["sections"]
    stored = a["codecs"]["planes"]
    assert a["codecs"] == {"raw": MIB, "planes": stored}
    assert a["coded"] == {"raw": MIB, "planes": MIB}, "of what is derived nothing is coded"
    assert (a["derived"], a["bytes"]) == (MIB // 2, MIB * 5 // 2)
    assert a["ratios"] == {"raw": 1.0, "planes": round(MIB / stored, 3)}
    assert 1.1 < a["ratios"]["planes"] < 1.3
    assert a["ratio"] == round(a["bytes"] / (MIB + stored), 3)
    assert (b["codecs"], b["ratios"]) == ({"raw": 40}, {"raw": 1.0})
    shown = " ".join(run("show", tmp_path).stdout.replace("\u2502", " ").split())
    assert f"{a['ratio']:.2f} x: raw 1.00 x, planes {a['ratios']['planes']:.2f} x" in shown
    assert shown.count(" x: ") == 1, "nothing is coded in b"


def test_what_chunks_are_decoded_with_is_told_and_freed_with_the_last_step_that_needs_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn(700, 500) * 0.02 for name in "ab"}
    keeps = fs.EngineOptions(compress="max", kept_bytes=16 * MIB)
    with fs.Checkpointer(tmp_path / "run", engine=keeps) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"m": tensors}).committed.result()
            for tensor in tensors.values():
                tensor.mul_(1 + 1e-4)
    base = {section["section"]: section for section in told("show", tmp_path / "run", "--step", 1)["sections"]}["m"]
    near = {section["section"]: section for section in told("show", tmp_path / "run", "--step", 3)["sections"]}["m"]
    assert base["decoded_with"] == {}
    assert near["decoded_with"] == {fs.open(tmp_path / "run", 1).manifest.id: base["written"]}
    assert near["codecs"] == {"xor": near["written"]}
    shown = " ".join(run("show", tmp_path / "run").stdout.replace("\u2502", " ").split())
    assert "of bases" in shown
    steps = {step["step"]: step for step in told("du", tmp_path / "run")["steps"]}
    assert steps[1]["alone_bytes"] < base["written"] < steps[3]["bytes"]
    assert steps[3]["up_to_bytes"] > base["written"]


def spoil(journal: Path, offset: int) -> None:
    (path,) = journal.glob("journal-*/rank-00000.journal")
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_verify_reads_the_journals_that_lead_on(journal: Path) -> None:
    done = run("verify", journal)
    assert done.exit_code == 0
    assert "a journal up to step 5" in done.stdout
    assert "all frames are intact" in done.stdout
    assert told("verify", journal)["journal"].keys() == {"base", "newest", "checked_bytes"}
    assert "journal" not in run("verify", journal, "--step", 1).stdout
    assert told("verify", journal / "step-00000001")["journal"] is None


@pytest.mark.parametrize(("frame", "where", "kind"), [
    (1, "payload", "the frame of step 3 does not match its digest"),
    (1, "document", "the frame of step 3 does not match its digest"),
    (1, "prefix", "steps 4 to 5 after it cannot be loaded"),
    (2, "prefix", "step 5 after it cannot be loaded"),
    (-1, "prefix", "steps 2 to 5 after it cannot be loaded"),
    (-1, "document", "its header does not match its digest; 4 step(s) after it cannot be loaded"),
])
def test_verify_finds_damage_of_a_journal(journal: Path, frame: int, where: str, kind: str) -> None:
    store = LocalStore(journal)
    (only_entry,) = journals.list_journals(store)
    places = journals.complete_frames(store, only_entry, 0)
    place = places[frame] if frame >= 0 else None
    begin, size = (0, places[0].offset) if place is None else (place.offset, place.frame.frame_bytes)
    offset = {"payload": size - 4096 + 64, "document": 80, "prefix": 20}[where]
    spoil(journal, begin + offset)
    done = run("verify", journal, "--json")
    told_of = json.loads(done.stdout)
    assert (done.exit_code, told_of["sound"]) == (1, False)
    assert any(kind in finding["what"] for finding in told_of["findings"])
    assert run("verify", journal, "--step", 1).exit_code == 0


def test_a_torn_tail_of_a_journal_is_no_damage(journal: Path) -> None:
    (last,) = (
        journals.complete_frames(LocalStore(journal), one, 0)[-1] for one in journals.list_journals(LocalStore(journal))
    )
    spoil(journal, last.offset + 20)
    assert run("verify", journal).exit_code == 0
    assert told("verify", journal)["journal"]["newest"] == 4
