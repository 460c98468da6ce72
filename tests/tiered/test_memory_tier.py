"""The memory of a node outlives its trainers: real processes, killed at random times; and the flushes afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import flowstone as fs
from flowstone import _native
from flowstone.commit import catalog
from flowstone.commit.manifests import read_marker
from flowstone.errors import StepExistsError
from flowstone.store.local import LocalStore
from flowstone.store.memory.agent_client import AgentClient
from flowstone.store.memory.agent_wire import AgentRequest
from flowstone.store.memory.contents import MemoryFile
from flowstone.store.memory.node_memory import NodeMemory
from memory_agent import agent_process, files_of, kill, memory_files, own_agent, processes_of
from warm_start import warm_start

_TRAINER = """
import sys
import numpy as np
import flowstone as fs

def filled(step):
    return {name: np.full(count, step, np.int32) for name, count in (("a", 700_001), ("b", 300), ("c", 350_000))}

flush_to = sys.argv[1] or None
checkpointer = fs.Checkpointer(fs.NodeMemory("run", flush_to=flush_to))
state = {"arrays": filled(0), "step": 0}
if checkpointer.latest() is not None:
    checkpointer.load(state)
    step = state["step"]
    assert all((one == step).all() for one in state["arrays"].values()), "a mixture"
    print("loaded", step, flush=True)
while True:
    state["step"] += 1
    for name, value in filled(state["step"]).items():
        state["arrays"][name][:] = value
    print("begun", state["step"], flush=True)
    checkpointer.save(state["step"], state).committed.result()
    print("committed", state["step"], flush=True)
"""


@pytest.fixture
def agent() -> Iterator[Path]:
    with own_agent() as directory:
        yield directory


@contextmanager
def _trainer(flush_to: Path | str = "") -> Iterator[subprocess.Popen[str]]:
    """A trainer that leads a process group, in which the agent that it starts is not; it is killed in the end."""
    with warm_start("-c"), subprocess.Popen(
        [sys.executable, "-c", _TRAINER, str(flush_to)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _until(process: subprocess.Popen[str], word: str, least: int = 0) -> list[tuple[str, int]]:
    """What it says, until it says that word with that number at least."""
    assert process.stdout is not None
    messages = []
    for line in process.stdout:
        result, number = line.split()
        messages.append((result, int(number)))
        if result == word and int(number) >= least:
            return messages
    pytest.fail(f"it ended after {messages[-3:]}")


def _soon(kind: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not kind():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_trainer_that_is_killed_at_any_instant_goes_on_from_the_previous_or_the_next_step(agent: Path) -> None:
    chance = random.Random(1)
    committed = begun = 0  # steps
    for _ in range(6):
        with _trainer() as process:
            message = _until(process, "begun")
            loaded = max((step for word, step in message if word == "loaded"), default=0)
            assert committed <= loaded <= begun
            message += _until(process, "begun", loaded + chance.randrange(2, 5))
            time.sleep(chance.random() * 0.02)
            process.kill()
            assert process.stdout is not None
            message += [(word, int(step)) for word, step in map(str.split, process.stdout)]
        begun = max(step for word, step in message if word == "begun")
        committed = max([committed, *(step for word, step in message if word == "committed")])
    checkpoint = fs.open("memory://run")
    assert committed <= checkpoint.step <= begun
    assert checkpoint.verify().sound
    assert agent_process(agent), "one agent, which none of the kills has ended"
    assert len(NodeMemory("run").names()) <= 3, "the marker and two generations: drafts go with their writer"


def test_what_a_killed_trainer_leaves_is_made_durable_bit_for_bit(agent: Path, tmp_path: Path) -> None:
    with _trainer(tmp_path / "disk") as process:
        _until(process, "committed", 3)
    memory = NodeMemory("run")
    _soon(lambda: (status := memory.status()) is not None and not status.jobs and status.flushed_step >= 3)
    status, disk = memory.status(), fs.open(tmp_path / "disk")
    assert status is not None
    assert status.flush_error == ""
    assert disk.verify().sound
    newest = catalog.steps(memory)[-1]
    assert disk.step == newest == status.flushed_step
    for name in memory.names(f"step-{newest:08d}"):
        assert (tmp_path / f"disk/step-{newest:08d}" / name).read_bytes() == memory.read(f"step-{newest:08d}/{name}")
    assert read_marker(LocalStore(tmp_path / "disk")).store == read_marker(memory).store, "both are one run's"
    with _trainer(tmp_path / "disk") as process:  # from memory, and what it saves then is of the same run
        assert _until(process, "loaded")[-1] == ("loaded", newest)
        _until(process, "committed", newest + 2)
    _soon(lambda: (status := memory.status()) is not None and status.flushed_step > newest + 1)
    assert catalog.steps(fs.open(tmp_path / "disk")._store)[0] == newest
    with fs.Checkpointer(tmp_path / "disk", keep=1) as later:  # retention counts what was flushed as its own
        later.save(10_000, {"x": np.zeros(3)}).committed.result()
    assert os.listdir(tmp_path / "disk").count("step-00010000") == 1
    assert len([name for name in os.listdir(tmp_path / "disk") if name.startswith("step-")]) == 1


def test_killing_both_leaves_what_is_on_disk_and_the_next_trainer_starts_another_agent(
    agent: Path, tmp_path: Path
) -> None:
    with _trainer() as process:
        _until(process, "committed", 2)
        kill(agent_process(agent), signal.SIGKILL)
    assert not NodeMemory("run").exists()
    with _trainer() as process:
        assert _until(process, "begun")[-1] == ("begun", 1), "nothing was left"
        _until(process, "committed", 2)
    assert fs.open("memory://run").verify().sound


def test_an_agent_that_is_told_to_end_makes_durable_what_it_is_to(agent: Path, tmp_path: Path) -> None:
    store = NodeMemory("run", flush_to=tmp_path / "disk")
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": np.arange(5)}).committed.result()
        kill(agent_process(agent), signal.SIGTERM)
    assert (fs.open(tmp_path / "disk").read("x", framework="numpy") == np.arange(5)).all()
    assert not agent.exists(), "nothing is left"


def test_memory_goes_once_no_job_has_used_it_for_a_while_and_the_agent_with_it(agent: Path) -> None:
    with fs.Checkpointer(fs.NodeMemory("run", linger_s=0.0)) as checkpointer:
        checkpointer.save(1, {"x": np.arange(5)}).committed.result()
        process = agent_process(agent)
    gone = os.pidfd_open(process)
    try:
        _soon(lambda: not NodeMemory("run").exists())
    finally:
        os.close(gone)


_PEER = """
import sys
import numpy as np
import flowstone as fs
memory = fs.PeerMemory("run", secret="a secret of 32 characters, or so", interface="127.0.0.1", linger_s=0)
checkpointer = fs.Checkpointer(memory)
checkpointer.save(1, {"x": np.zeros(2_000_000)}).committed.result()
print("committed", flush=True)
sys.stdin.read(1)
if sys.argv[1] == "ends":
    checkpointer.close()
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_a_job_leaves_no_process_no_memory_and_no_file(agent: Path, how: str) -> None:
    """With a server for other nodes, too. `linger_s` is 0: the agent lets all go, and ends."""
    named = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-c", _PEER, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        try:
            assert trainer.stdout.readline() == "committed\n"
            assert len(processes_of(agent)) == 2, "agent and server"
            assert memory_files(agent)
            if how == "ends":
                trainer.stdin.write("x")
                trainer.stdin.flush()
                _soon(lambda: not memory_files(agent))
                assert trainer.poll() is None, "it lives still, and holds nothing"
        finally:
            trainer.kill()
    _soon(lambda: not processes_of(agent))
    assert not memory_files(agent)
    assert files_of(agent) <= {"agent.log"}
    left = [name for name in set(os.listdir("/dev/shm")) - named if "flowstone" in name]
    assert not [name for name in left if not name.startswith("flowstone-tests-")], "but for those of other tests"


def test_a_flush_that_fails_is_told_and_what_is_there_already_is_left(agent: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("a file")
    store = NodeMemory("run", flush_to=tmp_path / "disk")
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": np.arange(5)}).committed.result()
        assert store.flush()
        _soon(lambda: (status := store.status()) is not None and bool(status.flush_error))
        status = store.status()
        assert status is not None
        assert "Error" not in status.flush_error.partition("\n")[0]
        assert str(tmp_path / "disk") in status.flush_error
        (tmp_path / "disk").unlink()
        _soon(lambda: (status := store.status()) is not None and status.flushed_step == 1)
    with pytest.raises(StepExistsError, match="another checkpoint of step 1"):
        _flush_another(tmp_path / "disk")


def _flush_another(directory: Path) -> None:
    from flowstone.tiered.newest import copy_newest

    with fs.Checkpointer("memory://another") as checkpointer:
        checkpointer.save(1, {"x": np.arange(6)}).committed.result()
    target = LocalStore(directory)
    try:
        copy_newest(NodeMemory("another"), target, "a test")
    finally:
        target.close()


def test_a_generation_that_is_damaged_is_not_made_durable_and_the_one_before_is(agent: Path, tmp_path: Path) -> None:
    from flowstone.store.memory import MemoryStore
    from flowstone.tiered.newest import copy_newest

    source = MemoryStore()
    with fs.Checkpointer(source) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": np.full(100_000, step)}).committed.result()
    file = source.contents.files["step-00000002/rank-00000.safetensors"]
    os.pwrite(file.fd, b"\x77", file.size_bytes - 9000)
    target = LocalStore(tmp_path / "disk")
    copied = copy_newest(source, target, "a test")
    target.close()
    assert copied is not None
    assert copied.step == 1
    assert fs.open(tmp_path / "disk").verify().sound
    assert "step 2 of" in copied.skipped_reason
    assert "is damaged" in copied.skipped_reason
    there = sorted(name for name in os.listdir(tmp_path / "disk") if not name.startswith(".rewound"))
    assert there == ["flowstone.json", "flowstone.lock", "step-00000001"]


def _flushed(store: NodeMemory, step: int) -> None:
    """Wait until the agent says that this step is durable."""
    _soon(lambda: (status := store.status()) is not None and not status.is_flushing and status.flushed_step == step)


def _newest_is_flushed(store: NodeMemory) -> bool:
    """Whether what the agent says is durable is the newest checkpoint in memory, by its identity."""
    status, newest = store.status(), fs.open(store).manifest
    return status is not None and (status.flushed_step, status.flushed_id) == (newest.step, newest.id)


def test_what_a_rewind_set_aside_does_not_come_back_from_the_disk(agent: Path, tmp_path: Path) -> None:
    """Memory and agent are lost as soon as `rewind` has returned."""
    store = NodeMemory("run", flush_to=tmp_path / "disk")
    with fs.Checkpointer(store) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": np.full(5, step)}).committed.result()
        assert store.flush()
        _flushed(store, 2)
        assert fs.open(tmp_path / "disk").step == 2
        checkpointer.rewind(1)
        kill(agent_process(agent), signal.SIGKILL)
        assert fs.open(tmp_path / "disk").step == 1
        assert fs.open(tmp_path / "disk").verify().sound
    NodeMemory("run").make_directory()  # the next agent takes over the socket that the killed one has left


def test_a_step_that_is_saved_again_after_a_rewind_is_what_the_disk_gets(agent: Path, tmp_path: Path) -> None:
    store = NodeMemory("run", flush_to=tmp_path / "disk")
    with fs.Checkpointer(store) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"x": np.full(5, step)}).committed.result()
    store = NodeMemory("run")
    _flushed(store, 3)
    with fs.Checkpointer(store) as checkpointer:  # the agent still knows where to
        checkpointer.rewind(2)
        checkpointer.save(3, {"x": np.full(5, 33)}).committed.result()
    store = NodeMemory("run")
    _soon(lambda: _newest_is_flushed(store))
    assert (fs.open(tmp_path / "disk", step=3).read("x", framework="numpy") == 33).all()
    assert fs.open(tmp_path / "disk").manifest == fs.open(store).manifest


def test_a_directory_that_cannot_follow_a_rewind_is_told_and_follows_later(
    agent: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, disk = NodeMemory("run", flush_to=tmp_path / "disk"), LocalStore(tmp_path / "disk")
    with fs.Checkpointer(store) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": np.full(5, step)}).committed.result()
        store.flush()
        _flushed(store, 2)
        disk.lock("somebody else")
        checkpointer.rewind(1)
        assert f"memory://run was rewound, but {tmp_path / 'disk'} still has the newer steps" in caplog.text
        assert f"run `flowstone flush memory://run {tmp_path / 'disk'}`" in caplog.text
        assert "somebody else" in caplog.text
        disk.close()
        _flushed(store, 1)
        assert fs.open(tmp_path / "disk").step == 1


@pytest.mark.parametrize("how", ["memory", "the command line"])
def test_a_damaged_generation_is_not_reported_as_flushed(agent: Path, tmp_path: Path, how: str) -> None:
    from typer.testing import CliRunner

    from flowstone.cli.app import app

    store = NodeMemory("run", flush_to=tmp_path / "disk" if how == "memory" else None)
    with fs.Checkpointer(store) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": np.full(700_000, step)}).committed.result()
        file = next(item for item in store._agent._written.values() if ".saving-00000002" in item.path)
        os.pwrite(file.fd, b"\x77" * 100, file.size_bytes - 9000)
        if how == "memory":
            store.flush()
            _soon(lambda: (status := store.status()) is not None and "step 2" in status.flush_error)
            status = store.status()
            assert status is not None
            assert "is damaged" in status.flush_error
            assert (status.flushed_step, status.flushed_id) == (1, fs.open(store, step=1).manifest.id)
        else:
            result = CliRunner().invoke(app, ["flush", "memory://run", str(tmp_path / "disk")])
            assert result.exit_code == 1
            assert "has step 1; step 2 of memory://run is damaged" in result.stdout.replace("\n", " ")
    assert fs.open(tmp_path / "disk").step == 1


def test_steps_in_memory_from_before_a_rewind_of_the_disk_do_not_come_there(agent: Path, tmp_path: Path) -> None:
    from flowstone.tiered.newest import copy_newest

    store = NodeMemory("run", flush_to=tmp_path / "disk")
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": np.full(5, 1)}).committed.result()
        assert store.flush()
        _flushed(store, 1)
        checkpointer.save(2, {"x": np.full(5, 2)}).committed.result()
        assert store.flush()
        _flushed(store, 2)
    with fs.Checkpointer(tmp_path / "disk") as alone:
        alone.rewind(1)
        alone.save(2, {"x": np.full(5, 22)}).committed.result()
    with fs.Checkpointer(NodeMemory("run")) as checkpointer:
        checkpointer.save(3, {"x": np.full(5, 3)}).committed.result()
    disk = LocalStore(tmp_path / "disk")
    with pytest.raises(StepExistsError, match="rewound to step 1, but memory://run still has the old step 3"):
        copy_newest(NodeMemory("run"), disk, "a test")
    disk.close()
    assert (fs.open(tmp_path / "disk").read("x", framework="numpy") == 22).all()


_RELATIVE = """
import os
import numpy as np
import flowstone as fs
store = fs.NodeMemory("run", flush_to="disk")
with fs.Checkpointer(store) as checkpointer:
    os.chdir("/")
    checkpointer.save(1, {"x": np.arange(5)}).committed.result()
"""


def test_a_relative_agent_directory_and_path_of_modules_are_the_same_for_all_processes(
    tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = os.path.relpath(Path(fs.__file__).parent.parent, tmp_path)
    own = {"FLOWSTONE_AGENT_DIR": "own", "PYTHONPATH": package}
    subprocess.run([sys.executable, "-c", _RELATIVE], check=True, cwd=tmp_path, env={**os.environ, **own})
    monkeypatch.setenv("FLOWSTONE_AGENT_DIR", str(tmp_path / "own"))
    try:
        _flushed(NodeMemory("run"), 1)
        assert _newest_is_flushed(NodeMemory("run"))
        assert (fs.open(tmp_path / "disk").read("x", framework="numpy") == np.arange(5)).all()
    finally:
        kill(agent_process(tmp_path / "own"), signal.SIGTERM)


def test_a_flush_that_finds_nothing_has_failed(agent: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flowstone.agent.flush", "run", str(tmp_path / "disk")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "memory://run has no checkpoint to flush" in ended.stderr
    assert not ended.stdout


def _flushing_child(agent: int) -> int | None:
    """The process that flushes for that agent."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return int(children[0]) if children else None


def test_a_flush_whose_process_is_killed_is_done_again(agent: Path, tmp_path: Path) -> None:
    store = NodeMemory("run", flush_to=tmp_path / "disk")
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": np.full(4_000_000, 1)}).committed.result()
        process = agent_process(agent)
        assert store.flush()
        child = _flushing_child(process)
        assert child is not None
        os.kill(child, signal.SIGKILL)
        _soon(lambda: (status := store.status()) is not None and "status -9" in status.flush_error)
        _soon(lambda: (status := store.status()) is not None and status.flushed_step == 1)
    assert fs.open(tmp_path / "disk").verify().sound
    assert not [name for name in os.listdir(tmp_path / "disk") if name.startswith(".saving")]


def test_a_flush_outlives_the_agent_that_has_begun_it(agent: Path, tmp_path: Path) -> None:
    """All of the checkpoint is open in the process that flushes before it makes its draft."""
    with fs.Checkpointer(NodeMemory("run", flush_to=tmp_path / "disk")) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": np.full(4_000_000, step)}).committed.result()
    _soon(lambda: any(name.startswith((".saving", "step-")) for name in _listed(tmp_path / "disk")))
    kill(agent_process(agent), signal.SIGKILL)
    assert not NodeMemory("run").exists()
    _soon(lambda: "step-00000002" in _listed(tmp_path / "disk"))
    assert (fs.open(tmp_path / "disk").read("x", framework="numpy") == 2).all()
    assert fs.open(tmp_path / "disk").verify().sound
    NodeMemory("run").make_directory()  # the next agent takes over the socket that the killed one has left


def _listed(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.exists() else []


def test_a_later_save_asks_the_agent_three_times_and_makes_nothing_new_before_it_returns(agent: Path) -> None:
    """What a save of 5 GB waits for, counted: its time is in bench/memory_tier.py."""
    model = torch.nn.Linear(1000, 700)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    asked: list[tuple[str, str]] = []
    ask, mapped, reserve = AgentClient.request, MemoryFile.mapped, _native.reserve_memory

    def noting_ask(client: AgentClient, request: AgentRequest, *arguments: object, **named: object) -> object:
        asked.append((threading.current_thread().name, request.verb))
        return ask(client, request, *arguments, **named)  # type: ignore[arg-type]

    def noting(kind: str, act: Callable[..., object]) -> Callable[..., object]:
        def noted(*arguments: object, **named: object) -> object:
            asked.append((threading.current_thread().name, kind))
            return act(*arguments, **named)

        return noted

    with fs.Checkpointer("memory://counted") as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, state).committed.result()
            optimizer.step()
        open_before = len(os.listdir("/proc/self/fd"))
        with (
            mock.patch.object(AgentClient, "request", noting_ask),
            mock.patch.object(MemoryFile, "mapped", noting("a mapping", mapped)),
            mock.patch.object(_native, "reserve_memory", noting("new memory", reserve)),
        ):
            for step in range(5, 8):
                asked.clear()
                save = checkpointer.save(step, state)
                waited_for = [kind for thread, kind in asked if thread in ("MainThread", "flowstone-act")]
                assert waited_for == ["exists", "make_directory", "create"]
                save.committed.result()
                optimizer.step()
                checkpointer.wait()
                assert "new memory" not in [kind for _, kind in asked]
        assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_run_in_memory_is_compared_and_exported_by_its_url(agent: Path, tmp_path: Path) -> None:
    state = {"model": {"w": np.arange(70_000, dtype=np.float32)}, "step": 3}
    for place in ("memory://compared", tmp_path / "disk"):
        with fs.Checkpointer(place) as checkpointer:
            checkpointer.save(3, state)
    assert fs.diff("memory://compared", tmp_path / "disk", section="").equal
    report = fs.export("memory://compared", tmp_path / "out")
    assert report.files == ("model.safetensors",)
    with pytest.raises(fs.NoCheckpointError, match="memory://nothing"):
        fs.export("memory://nothing", tmp_path / "none")
