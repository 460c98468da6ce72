"""A hanging process of a test reports its stacks, even while it holds Python's lock; one in time reports nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
AFTER_S = 2.0
JOB = """
import ctypes, multiprocessing, pathlib, time

def waits_for_ever():
    {how}

def main():
    hung = multiprocessing.get_context("spawn").Process(target=waits_for_ever)
    hung.start()
    said = [pathlib.Path({folder!r}, f"{{hung.pid}}-{{which}}.txt") for which in ("python", "threads")]
    begun = time.monotonic()
    while hung.is_alive() and time.monotonic() < begun + 90:
        if all(path.exists() and path.stat().st_size for path in said):
            time.sleep(1)  # it may be writing
            break
        time.sleep(0.1)
    hung.kill()
    print(hung.pid)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def late_ranks() -> ModuleType:
    return tool("late_ranks")


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(late_ranks: ModuleType, place: Path, how: str, after_s: float) -> str:
    """The process that the job has started."""
    (place / "job.py").write_text(JOB.format(how=how, folder=str(place / "late")))
    environment = late_ranks.environment(place / "late", after_s)
    with late_ranks.watched(place / "late", after_s):
        ended = subprocess.run(
            [sys.executable, str(place / "job.py")], env=environment, capture_output=True, text=True, timeout=180,
            check=True,
        )
    return ended.stdout.split()[-1]


@pytest.mark.parametrize("how", [
    "time.sleep(60)", "ctypes.PyDLL(None).pause()", "import atexit; atexit.register(time.sleep, 60)",
], ids=["waiting", "with Python's lock", "at its end"])
def test_a_process_that_hangs_says_where(how: str, late_ranks: ModuleType, tmp_path: Path) -> None:
    hung = run(late_ranks, tmp_path, how, AFTER_S)
    assert {path.name for path in late_ranks.told(tmp_path / "late")} == {f"{hung}-python.txt", f"{hung}-threads.txt"}
    stacks = (tmp_path / "late" / f"{hung}-python.txt").read_text()
    assert "most recent call first" in stacks
    assert ("waits_for_ever" in stacks) == ("atexit" not in how)
    threads = (tmp_path / "late" / f"{hung}-threads.txt").read_text()
    assert f"thread {hung} " in threads
    assert "libc" in threads
    late_ranks.environment(tmp_path / "late", AFTER_S)
    assert not late_ranks.told(tmp_path / "late"), "the next run begins without"


def test_a_process_that_is_in_time_says_nothing(late_ranks: ModuleType, tmp_path: Path) -> None:
    run(late_ranks, tmp_path, "pass", 600.0)
    assert not late_ranks.told(tmp_path / "late")


def test_a_known_failure_is_none_that_took_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOLS)
    report = tmp_path / "report.xml"
    late = "RuntimeError: Process 0 terminated or timed out after 1200.1 seconds"
    cases = {"test_overwrite": "RuntimeError: Process 0 exited with error code 10", "test_partial_load": late}
    failed = [f'<testcase name="{name}"><failure message="{case}"/></testcase>' for name, case in cases.items()]
    report.write_text(f"""<testsuites><testsuite>{"".join(failed)}
        <testcase name="test_new"><error message="AssertionError"/></testcase>
        <testcase name="test_sound"/><testcase name="test_left_out"><skipped message="Need 2 GPUs"/></testcase>
    </testsuite></testsuites>""")
    actual = tool("upstream_dcp").failures(report)
    assert {name: bool(why) for name, why in actual.items()} == {
        "test_overwrite": True, "test_partial_load": False, "test_new": False
    }
