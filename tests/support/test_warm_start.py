"""To itself and to its parent, a process forked after the import of torch looks like a started one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warm_start import warm_start

TOLD = """
import os, sys, threading
print("torch" in sys.modules, file=sys.stderr)
print(__name__, vars().get("__file__"), sys.argv, sys.path[0], os.getcwd(), os.environ["WORD"], sys.stdin.read())
print(os.getppid(), os.getsid(0) == os.getpid(), threading.active_count(), sorted(os.listdir("/proc/self/fd")))
print(sys.stdout.seekable(), sys.stdin.seekable())
sys.exit(3)
"""
ENDS = """
import atexit, sys, threading, time
class Apart:
    def __del__(self):
        print("taken apart")
def late():
    threading.main_thread().join()
    print("thread")
apart = Apart()
atexit.register(print, "handler")
threading.Thread(target=late).start()
print("last line")
"""
WAITS = "import time; print('up', flush=True); time.sleep(60)"


@pytest.mark.parametrize("program", [["-m", "told"], ["below/told.py"], ["-c", TOLD]], ids=["module", "script", "text"])
@pytest.mark.parametrize("torch_alone", [False, True])
def test_a_forked_process_cannot_tell_that_it_was_not_started(
    program: list[str], torch_alone: bool, tmp_path: Path
) -> None:
    (tmp_path / "below").mkdir()
    for script in (tmp_path / "told.py", tmp_path / "below" / "told.py"):
        script.write_text(TOLD)
    if program[0].endswith(".py"):
        program = [str(tmp_path / program[0])]
    environment = os.environ | {"WORD": "said"}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *program, "a", "b"], cwd=tmp_path, env=environment, input="in", text=True,
            capture_output=True, check=False, start_new_session=True,
        )

    started = run()
    with warm_start(program[-1] if program[0] == "-m" else program[0], torch_alone=torch_alone):
        run()  # the first process of a program, unless another test has started it
        forked = run()
    assert (started.returncode, started.stderr) == (3, "False\n")
    assert (forked.returncode, forked.stderr) == (3, "True\n")
    assert forked.stdout == started.stdout


@pytest.mark.parametrize("last", [
    "", "sys.exit()", "sys.exit(7)", "sys.exit(263)", "sys.exit(True)", "sys.exit('words')",
    "raise ValueError('words')", "raise KeyboardInterrupt",
])
@pytest.mark.parametrize("whole_end", [False, True])
def test_a_forked_process_ends_as_one_that_was_started(last: str, *, whole_end: bool) -> None:
    """Without `whole_end` it ends before Python clears its modules; if it is interrupted, it clears them too."""

    def run() -> tuple[int, list[str], list[str]]:
        done = subprocess.run([sys.executable, "-c", ENDS + last], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()[-1:]

    status, out, error = run()
    with warm_start("-c", whole_end=whole_end):
        run()
        forked = run()
    if not whole_end and "KeyboardInterrupt" not in last and "taken apart" in out:
        out.remove("taken apart")
    assert forked == (status, out, error)


def test_a_forked_process_is_waited_for_and_killed_as_a_child(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with warm_start("waits"):
        for _ in range(2):
            with subprocess.Popen([sys.executable, "-m", "waits"], cwd=tmp_path, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"up\n"
                assert process.poll() is None
                process.kill()
                assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(("option", "seen"), [
    ({"preexec_fn": lambda: os.umask(0o3)}, "os.umask(0)"),
    ({"pass_fds": (0,)}, "int(os.path.exists(f'/proc/self/fd/{sys.argv[1]}')) * 3"),
    ({"executable": "/bin/echo"}, None),
    ({"shell": True}, None),
    ({"umask": 3}, "os.umask(0)"),
    ({"process_group": 0}, "int(os.getpgid(0) == os.getpid()) * 3"),
], ids=["preexec_fn", "pass_fds", "executable", "shell", "umask", "process_group"])
def test_what_is_to_be_started_in_a_way_of_its_own_is_started(
    option: dict[str, Any], seen: str | None, tmp_path: Path
) -> None:
    """Each of these texts prints 3 and that torch is absent; if Python's own text is missing, nothing of it runs."""
    message = f"import os, sys; print('torch' in sys.modules, {seen})"
    with (tmp_path / "kept").open("w") as kept, warm_start("-c"):
        option = option | ({"pass_fds": (kept.fileno(),)} if "pass_fds" in option else {})
        for _ in range(2):  # the first process of a program is started in any case
            done = subprocess.run(
                [sys.executable, "-c", message, str(kept.fileno())], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
                text=True, check=True, **option,
            )
        without_python = {"executable": f"-c {message} {kept.fileno()}\n", "shell": ""}
    assert done.stdout == without_python.get(next(iter(option)), "False 3\n")
