"""The session for a machine with a GPU, complete, on the simulated device; and its final table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import __main__ as session
from bench.gpu import bounded, correctness, faults, options, table
from bench.gpu.options import Options, Row
from warm_start import warm_start

ROOT = Path(__file__).resolve().parent.parent.parent


def row(kind: str, value: object, **more: object) -> Row:
    return {"what": kind, "value": value, "unit": "", **more}


GOOD: table.Stages = {
    "ceilings": [
        row("D2H pinned 8 MiB x 1", 50.0), row("D2H pinned 64 MiB x 2", 54.0), row("D2H pageable 64 MiB x 1", 99.0),
        row("H2D pinned 64 MiB x 1", 55.0), row("disk write", 3.0), row("disk read", 6.0),
    ],
    "correctness": [row("tests, default: failed", 0)],
    "faults": [row("fault: fork", "step 2 is there and whole", passed=True), row("fault: memory sanitizer", "skipped")],
    "performance": [
        row("save, p95", 9.5), row("capture, warm", 50.0), row("durable, later", 2.8), row("load, cold", 5.6),
        row("step time lost outside of the fence", 0.5), row("what was loaded is what was saved", True),
        row("saves, false alarms", 0, of=20), row("saves, false alarms, with digests", 0, of=10),
    ],
    "rivals": [row("flowstone: perceived", 980.0), row("torch.save: perceived", 20.0)],
}


def judged(stages: table.Stages) -> list[str]:
    return [line.asked for line in table.lines(stages) if not line.passed]


def test_a_session_in_which_all_is_well_passes_every_line() -> None:
    assert judged(GOOD) == []


@pytest.mark.parametrize(("stage", "changed", "failing"), [
    ("correctness", row("tests, default: failed", 2), "tests that fail: none"),
    ("correctness", row("tests, default: failed", "pytest ended with 4"), "tests that fail: none"),
    ("faults", row("fault: fork", "stood still", passed=False), "faults that end badly: none"),
    ("performance", row("what was loaded is what was saved", False), "loads of other bits: none"),
    ("performance", row("saves, false alarms", 1, of=20), "false alarms: none"),
    ("performance", row("saves, false alarms, with digests", 1, of=10), "false alarms: none"),
    ("performance", row("save, p95", 10.5), "save, p95, under 10 ms"),
    ("performance", row("capture, warm", 48.0), "warm capture, relative to the pinned rate, 0.9 and more"),
    ("performance", row("durable, later", 2.6), "durable, relative to the disk's rate, 0.9 and more"),
    ("performance", row("load, cold", 5.3), "cold load, relative to the lower of disk and H2D, 0.9 and more"),
    ("performance", row("step time lost outside of the fence", 1.2), "step time lost outside of the fence, under 1 %"),
    ("rivals", row("flowstone: perceived", 900.0), "perceived throughput, relative to torch.save's, 48 and more"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_each_line_fails_for_its_own_reason(stage: str, changed: Row, failing: str) -> None:
    rows = [changed if row["what"] == changed["what"] else row for row in GOOD[stage]]
    assert judged({**GOOD, stage: rows}) == [failing]


@pytest.mark.parametrize("stage", [stage for stage in GOOD if stage != "ceilings"])
def test_what_was_not_measured_has_not_passed(stage: str) -> None:
    without = {name: rows for name, rows in GOOD.items() if name != stage}
    assert judged(without)
    assert "not measured" in table.text(without, dict.fromkeys(without, "1 s"))


def test_a_stage_that_stands_still_is_ended_and_leaves_what_it_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = "import sys, time; print('{\"what\": \"a\", \"value\": 1, \"unit\": \"\"}', flush=True); time.sleep(600)"
    own = subprocess.Popen
    monkeypatch.setattr(session.subprocess, "Popen", lambda command, **how: own([command[0], "-c", talks], **how))
    with (tmp_path / "log").open("w") as log:
        rows, ended = session.run("facts", session.Options(True, tmp_path), log, tmp_path / "running", 3.0)
    assert rows == [{"what": "a", "value": 1, "unit": ""}]
    assert ended == ", stopped after 3 s!"


def test_a_session_whose_stages_stand_still_ends_in_time_and_says_which_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SESSION_S", 9.0)
    monkeypatch.setitem(session.LIMITS_S, "facts", 2.0)  # type: ignore[index]
    stands, own = [sys.executable, "-c", "import time; time.sleep(600)"], subprocess.Popen
    monkeypatch.setattr(session.subprocess, "Popen", lambda _, **how: own(stands, **how))
    begin = time.monotonic()
    stages = "facts", "ceilings", "kinds"
    assert session.main(["--simulate", "--out", str(tmp_path), "--scratch", str(tmp_path), "--only", *stages]) == 1
    assert time.monotonic() - begin < 60
    took = json.loads((tmp_path / "session.json").read_text())["took"]
    assert took["facts"].endswith("stopped after 2 s!")
    assert took["ceilings"].endswith(" s!"), "it has what is left"
    assert took["kinds"] == "not run: the stages before took all the time!"


STAGE_WITH_A_CHILD = """
import sys; sys.path.insert(0, {root!r}); sys.argv = ["stage", "facts"]
from bench.gpu import bounded, facts
facts.main = lambda: (print('{{"what": "a", "value": 1, "unit": ""}}', flush=True), bounded.run({child!r}, 600))
import runpy; runpy.run_module("bench.gpu.stage", run_name="__main__")
"""


def test_a_session_that_is_ended_leaves_what_was_found_and_no_process(tmp_path: Path) -> None:
    """Of a stage, too, that has started something in a session of its own, as that of the tests does."""
    child = ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 600"]
    code = STAGE_WITH_A_CHILD.format(root=str(ROOT), child=child)
    fake = f"""
import subprocess, sys; sys.path.insert(0, {str(ROOT)!r})
from bench.gpu import __main__ as session
own = subprocess.Popen
session.subprocess.Popen = lambda _, **how: own([sys.executable, "-c", {code!r}], **how)
sys.exit(session.main(["--simulate", "--out", {str(tmp_path)!r}, "--scratch", {str(tmp_path)!r}, "--only", "facts"]))
"""
    with subprocess.Popen([sys.executable, "-c", fake], cwd=ROOT) as process:
        await_file(tmp_path / "pid")
        process.terminate()
        assert process.wait(60) == 128 + 15
    assert json.loads((tmp_path / "running.jsonl").read_text()) == {"what": "a", "value": 1, "unit": ""}
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def await_file(path: Path) -> None:
    end = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_cases_of_faults_together_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    begin = time.monotonic()
    with (tmp_path / "log").open("w") as log:
        actual = list(faults.judged(Options(True, tmp_path), log, 2.0))
    assert time.monotonic() - begin < 30
    assert [row["passed"] for row in actual if "passed" in row] == [False] * len(faults.CASES)
    assert actual[1]["value"] == "not run: the cases before took all the time"


def test_a_configuration_that_stands_still_leaves_the_others_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits_s = correctness.LIMITS_S
    monkeypatch.setattr(correctness, "LIMITS_S", (1.0, 1.0))
    own = bounded.run
    stands = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(bounded, "run", lambda _, limit_s, **how: own(stands, limit_s, **how))
    monkeypatch.setattr(correctness, "parse", lambda: Options(False, tmp_path))
    correctness.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["what"] for row in rows] == [f"tests, {name}" for name in correctness.CONFIGURATIONS]
    assert {row["value"] for row in rows} == {"stood still for 1 s"}
    assert limits_s[0] + (len(correctness.CONFIGURATIONS) - 1) * limits_s[1] < session.LIMITS_S["correctness"]


def test_of_a_configuration_that_stands_still_the_tests_before_count_and_the_one_that_does_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "passes", "is_skipped", "fails", "stands_still", "comes_later"
    body = dict(zip(names, ("pass", "pytest.skip()", "assert 0", "time.sleep(600)", "pass"), strict=True))
    file = tmp_path / "tests" / "test_some.py"
    file.parent.mkdir()
    file.write_text("import pytest, time\n" + "".join(f"def test_{name}(): {does}\n" for name, does in body.items()))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    monkeypatch.setattr(correctness, "ROOT", tmp_path)
    monkeypatch.setattr(correctness, "LIMITS_S", (5.0, 5.0))
    monkeypatch.setattr(correctness, "tests", lambda *_, **__: ("tests/test_some.py",))
    monkeypatch.setattr(correctness, "parse", lambda: Options(True, tmp_path))
    correctness.main()
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["what"], row["value"]) == ("tests, default", "stood still for 5 s")
    assert (row["passed"], row["skipped"]) == (1, 1)
    assert row["names"] == ["tests/test_some.py::test_fails", "tests/test_some.py::test_stands_still"]


def test_a_process_is_ended_with_those_that_it_has_started() -> None:
    begin = time.monotonic()
    late = bounded.run(["sh", "-c", "sleep 600 & echo said; sleep 600"], 0.5)
    assert (late.status, late.out) == (None, "said\n")
    assert time.monotonic() - begin < 60, "a child that holds the pipe is not waited for"
    done = bounded.run(["sh", "-c", "echo said; exit 3"], 60)
    assert (done.status, done.out) == (3, "said\n")


def test_on_a_gpu_each_configuration_runs_the_tests_of_cuda_and_the_first_one_those_of_ranks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def noted(command: list[str], *_: object, **__: object) -> bounded.Done:
        asked.append(command)
        return bounded.Done(0, "", "")

    monkeypatch.setattr(bounded, "run", noted)
    monkeypatch.setattr(correctness, "parse", lambda: Options(False, tmp_path))
    correctness.main()
    ran = [{word for word in command if word.startswith("tests/")} for command in asked]
    everywhere = {"tests/state/test_cuda.py", "tests/stage/test_cuda_capture.py", "tests/stage/test_cuda_derived.py"}
    assert ran == [everywhere | {"tests/ranks/test_cuda_replicas.py"}] + [everywhere] * 3


def test_a_session_takes_less_than_nine_minutes() -> None:
    stop_s = len(session.STAGES) * session.STOP_S  # and what it may take to end a stage
    assert session.SESSION_S + session.STOP_S < 9 * 60
    assert max(session.LIMITS_S.values()) + stop_s < session.SESSION_S / 2
    assert tuple(session.LIMITS_S) == session.STAGES


def script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "WHEELS": "there-are-none", **variables}
    command = ["sh", "tools/gpu_session.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_script_runs_the_flowstone_that_is_there(tmp_path: Path) -> None:
    done = script("run", str(tmp_path / "out"), "--simulate", "--only", "facts", "--scratch", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "GPU" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"session.json", "table.txt", "log.txt"}


@pytest.mark.usefixtures("conductor")
def test_without_a_gpu_a_session_says_so_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with warm_start("bench.gpu.stage"):
        assert session.main(["--out", str(tmp_path / "out"), "--only", "facts", "--scratch", str(tmp_path)]) == 1
    assert "torch sees no CUDA device; --simulate plays one" in (tmp_path / "out" / "log.txt").read_text()


def test_a_python_without_torch_is_told_at_once(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o700)
    done = script("run", str(tmp_path / "out"), PYTHON=str(bare))
    assert done.returncode == 2
    assert "has no torch; PYTHON= says which one has" in done.stderr


def test_states_are_as_large_as_disk_and_memory_have_room_for_and_are_written_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    free = {"bytes": 1 << 40}
    monkeypatch.setattr(options.shutil, "disk_usage", lambda _: usage._replace(free=free["bytes"]))
    monkeypatch.setattr(options.os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 1 << 25)  # 128 GiB
    assert options.state_bytes_max(tmp_path, None) == options.STATE_BYTES
    assert options.state_bytes_max(tmp_path, 1.5) == 12_000_000_000
    free["bytes"] = 40_000_000_000
    assert options.state_bytes_max(tmp_path, 3.0) == 10_000_000_000
    own = Options(False, tmp_path, 10_000_000_000)
    assert options.parse(own.words()) == own
    free["bytes"] = 64 << 20  # as /dev/shm in most containers
    assert own.in_memory(1 << 30) == tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"), [((), "pack"), (("run",), "where results are to go"), (("go",), "pack")]
)
def test_the_script_says_how_it_is_called(arguments: tuple[str, ...], message: str) -> None:
    done = script(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.usefixtures("conductor")
def test_a_whole_session_on_the_simulated_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warm_start("bench.gpu.stage"):
        status = session.main(["--simulate", "--out", str(tmp_path / "out"), "--scratch", str(tmp_path)])
    shown = capsys.readouterr().out
    assert status == 0, shown
    record = json.loads((tmp_path / "out" / "session.json").read_text())
    assert list(record["stages"]) == list(session.STAGES)
    measured = {line.asked: line.measured for line in table.lines(record["stages"])}
    assert None not in measured.values(), measured
    assert {fault["passed"] for fault in record["stages"]["faults"] if "passed" in fault} == {True}
    kinds = {row["what"]: row["value"] for row in record["stages"]["kinds"]}
    assert {kinds[f"replicas that differ in one byte are told, rank {rank}"] for rank in (0, 1)} == {True}
    assert kinds["what follows is not copied"] is True
    assert kinds["strided, digests: the same bits"] is True
    (tests,) = record["stages"]["correctness"]
    assert tests["passed"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing of it is left on the disk that was measured"
    assert (tmp_path / "out" / "table.txt").read_text() in shown
