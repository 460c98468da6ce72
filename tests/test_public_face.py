"""The names of the package `flowstone`: all of them, by completion, by type checkers, and without torch."""

from __future__ import annotations

import subprocess
import sys
import typing
from importlib import resources

import flowstone as fs


def test_every_public_name_is_found_by_completion() -> None:
    assert set(fs.__all__) <= set(dir(fs))
    assert all(hasattr(fs, name) for name in fs.__all__)
    assert len(set(fs.__all__)) == len(fs.__all__)


def test_every_event_rule_and_error_is_exported() -> None:
    from flowstone import errors
    from flowstone.events import phases as events
    from flowstone.rules import load_rules as rules

    named = {*typing.get_args(events.Event), *typing.get_args(rules.Rule)}
    named |= {var for var in vars(errors).values() if isinstance(var, type) and issubclass(var, fs.FlowstoneError)}
    assert len(named) > 30
    assert [item.__name__ for item in named if getattr(fs, item.__name__, None) is not item] == []
    assert {"Event", "OnEvent", "Rule"} <= set(fs.__all__)


def test_type_checkers_are_told_that_there_are_types() -> None:
    assert resources.files("flowstone").joinpath("py.typed").is_file()


def test_completion_imports_no_torch() -> None:
    text = "import sys, flowstone; assert 'Checkpointer' in dir(flowstone); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "False\n"
