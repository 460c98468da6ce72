"""Options are folders that can be deleted: saves, kills, loads and checks still work (flowstone/extensions.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flowstone as fs
import journaled
from flowstone import _native, extensions
from module_imports import module_imports
from warm_start import warm_start

PACKAGE = Path(fs.__file__).parent
PUBLIC = {"__init__.py", "stores/file_systems.py", "stores/striped.py"}  # names of options, which nothing else imports

FIRST = """
import sys

# without the finder of the editable installation, the path leads to the copy
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""
LIFE = """
import os, signal, sys
import numpy as np
import torch
import flowstone as fs

copy, store, use = sys.argv[1:]
assert fs.__file__.startswith(copy), fs.__file__

@STATE@
child = os.fork()
if child == 0:
    checkpointer = fs.Checkpointer(store)
    checkpointer.save(1, state(1))
    checkpointer.wait()
    checkpointer.save(2, state(2))
    os.kill(os.getpid(), signal.SIGKILL)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
with fs.Checkpointer(store) as checkpointer:
    loaded = state(0)
    step = checkpointer.load(loaded).step
    assert step in (1, 2) and loaded["step"] == step
    assert (weight(loaded) == step).all()
    checkpointer.save(3, loaded)
assert fs.open(store).verify().step == 3
try:
    exec(use)
except ImportError as error:
    print(error)
"""
TENSORS = """
def state(value):
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": value}

def weight(state):
    return state["model"].weight
"""
ARRAYS = """
def state(value):
    return {"model": {"weight": np.full((4, 4), value)}, "generator": np.random.default_rng(value), "step": value}

def weight(state):
    return state["model"]["weight"]
"""
USES = {
    "providers": "fs.Provider",
    "torch": "fs.Checkpointer(store + '-2').save(1, {'model': torch.nn.Linear(4, 4)})",
    "journal": "fs.Checkpointer(store + '-2', every_step=True)",
    "delta": "fs.Checkpointer(store + '-2', engine=fs.EngineOptions(compress='auto'))",  # codecs need it
    "codecs": "fs.Checkpointer(store + '-2', engine=fs.EngineOptions(compress='auto'))",
    "layouts": "fs.Split",
    "tiered": "fs.Checkpointer([store, store + '-2'])",
    "store.memory": "fs.Checkpointer('memory://run')",
    "store.objects": "fs.Checkpointer('s3://bucket/run')",
    "store.peers": "fs.PeerMemory",
    "store.striped": "fs.Striped",
    "store.wrap": "import flowstone.store.wrap",
    "convert": "fs.export",
    "inspection": "fs.explain",
    "adapters": "import flowstone.adapters.dcp",
    "cli": "import runpy; runpy.run_module('flowstone', run_name='__main__')",
    "agent": "from flowstone.store.memory import agent_client; agent_client.start_agent(store)",
    "replica": "fs.Replica",
    "node_reads": "",  # each rank then reads all that it needs
}

FOR_A_PART = {  # an option -> options that it imports, and that only a part of it needs
    "agent": {"store.peers", "tiered"},  # its children that serve other nodes, and that flush
    "cli": {"convert", "store.memory", "tiered"},  # some verbs
    "journal": {"torch"},  # records and replays; a reader of the store has to know only which steps are in journals
    "tiered": {"store.memory"},  # flushes of a run in memory
}

def copy_without(path: Path, without: tuple[str, ...], *, emptied: bool = False) -> Path:
    """A copy of the package below `path`, without these options, or with empty folders of theirs."""
    package = path / "flowstone"
    shutil.copytree(PACKAGE, package)  # with what is compiled, which would take most of the time
    native = Path(_native.__file__)
    shutil.copy(native, package / native.name)
    for option in without:
        shutil.rmtree(package / option.replace(".", "/"))
        if emptied:
            (package / option.replace(".", "/") / "__pycache__").mkdir(parents=True)
    return path


def run_life(
    path: Path, without: tuple[str, ...], use: str, program: str = LIFE, *, emptied: bool = False
) -> str:
    """The output of a process with such a copy: it saves, dies, loads and verifies, then runs `use`, a program."""
    copy = copy_without(path / "copy", without, emptied=emptied)
    program = program.replace("@STATE@", ARRAYS if {"torch", "providers"} & set(without) else TENSORS)
    with warm_start("-c", torch_alone=True):
        done = subprocess.run(
            [sys.executable, "-c", FIRST + program, str(copy), str(path / "run"), use],
            env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_option_is_tried() -> None:
    assert set(USES) == set(extensions.OPTIONS)


@pytest.mark.parametrize("option", extensions.OPTIONS)
def test_without_an_option_all_else_works_and_the_error_names_it(option: str, tmp_path: Path) -> None:
    message = run_life(tmp_path, (option,), USES[option])
    assert (f"flowstone.{option}" in message) == bool(USES[option]), message


@pytest.mark.parametrize("emptied", [False, True])
def test_without_any_option_a_run_is_saved_killed_loaded_and_verified(emptied: bool, tmp_path: Path) -> None:
    nested = tuple(extensions.OPTIONS)
    assert "lacks flowstone.journal" in run_life(tmp_path, nested, USES["journal"], emptied=emptied)


def test_a_replica_is_refused_without_the_options_that_it_needs(tmp_path: Path) -> None:
    needs = "fs.Checkpointer(store + '-2', every_step=fs.Replica('train:build'))"
    assert "lacks flowstone.store.memory" in run_life(tmp_path, ("store.memory",), needs)


@pytest.mark.parametrize(("absent", "point"), [("delta", "codecs"), ("torch", "replica")])
def test_an_option_is_refused_without_another_that_it_needs(absent: str, point: str, tmp_path: Path) -> None:
    needs = f"from flowstone.extensions import extension; extension({point!r})"
    assert f"lacks flowstone.{absent}" in run_life(tmp_path, (absent,), needs)


def test_a_verb_names_the_folder_that_it_needs(tmp_path: Path) -> None:
    needs = """
import contextlib, runpy
sys.argv = ["flowstone", "export", store, store + "-2"]
with contextlib.redirect_stderr(sys.stdout), contextlib.suppress(SystemExit):
    runpy.run_module("flowstone", run_name="__main__")
"""
    output = run_life(tmp_path, ("convert",), needs)
    assert output.startswith("FrameworkError: this installation lacks flowstone.convert")


def test_a_module_that_was_never_in_an_option_is_no_missing_option() -> None:
    assert extensions.missing_module(ModuleNotFoundError(name="flowstone.delta.never"), "a save") is None


def test_every_step_is_durable_without_replicas(tmp_path: Path) -> None:
    use = "with fs.Checkpointer(store + '-2', every_step=True) as checkpointer: checkpointer.save(1, state(1))"
    assert run_life(tmp_path, ("replica", "store.memory"), f"{use}\nprint('saved')") == "saved\n"


JOURNALED = """
import sys
import torch
import flowstone as fs

copy, store, _ = sys.argv[1:]
assert fs.__file__.startswith(copy), fs.__file__
state = {"model": torch.nn.Linear(16, 16)}
with fs.Checkpointer(store) as checkpointer:
    for act in (lambda: checkpointer.load(state), lambda: checkpointer.save(9, state)):
        try:
            act()
        except fs.FrameworkError as error:
            print(error)
assert fs.open(store).verify().step == 1
"""

READ_JOURNALED = """
import sys
import flowstone as fs

try:
    fs.open(sys.argv[2], 9)
except fs.NoCheckpointError as error:
    print(error)
"""


def test_without_journals_a_store_that_has_one_is_refused(tmp_path: Path) -> None:
    journaled.run(journaled.Training(width=16), tmp_path / "run", 1, 5)
    assert run_life(tmp_path, ("journal",), "", JOURNALED).count("lacks flowstone.journal") == 2


def test_without_torch_the_steps_of_a_journal_are_known(tmp_path: Path) -> None:
    journaled.run(journaled.Training(width=16), tmp_path / "run", 1, 5)
    assert "journal" in run_life(tmp_path, ("torch",), "", READ_JOURNALED)


def _options_imported(path: Path) -> set[str]:
    """Options that a file imports, wherever the import stands, but for types."""
    return {option for option in map(extensions.option_of, module_imports(path)) if option is not None}


CORE_LINES_MAX = 30_000
"""Of Python, with docstrings, outside of the options."""


def test_the_core_stays_small() -> None:
    options = [PACKAGE / option.replace(".", "/") for option in extensions.OPTIONS]
    core = [path for path in PACKAGE.rglob("*.py") if not any(option in path.parents for option in options)]
    assert sum(len(path.read_text().splitlines()) for path in core) < CORE_LINES_MAX


def test_the_core_imports_no_option() -> None:
    options = [PACKAGE / option.replace(".", "/") for option in extensions.OPTIONS]
    for path in sorted(PACKAGE.rglob("*.py")):
        if str(path.relative_to(PACKAGE)) in PUBLIC or any(option in path.parents for option in options):
            continue
        assert not _options_imported(path), f"{path.relative_to(PACKAGE)}: reach it by flowstone/extensions.py"


def _needed(option: str) -> set[str]:
    """An option, and all that it needs, directly or indirectly."""
    return {option}.union(*map(_needed, extensions.OPTIONS[option]))


@pytest.mark.parametrize("option", extensions.OPTIONS)
def test_the_table_names_the_options_that_an_option_imports(option: str) -> None:
    imported = set[str]().union(*map(_options_imported, (PACKAGE / option.replace(".", "/")).rglob("*.py")))
    assert imported - _needed(option) == FOR_A_PART.get(option, set())
    if option != "codecs":  # what it encodes is stored as the chunks of a delta are
        assert imported >= set(extensions.OPTIONS[option])


@pytest.mark.parametrize("point", extensions.POINTS)
def test_every_extension_point_leads_to_an_option(point: str) -> None:
    module, _ = extensions.POINTS[point]
    assert extensions.option_of(module)
    assert extensions.extension(point)
