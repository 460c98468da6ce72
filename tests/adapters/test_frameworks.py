"""A framework that is missing, or has an unknown version, is reported by name."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

import flowstone as fs
from flowstone.adapters.deepspeed import attach
from flowstone.adapters.framework import SupportedFramework

FRAMEWORK = SupportedFramework("sundial", "sundial[all]", ("1.0", "1.2"))


def test_an_adapter_without_its_framework_names_what_to_install() -> None:
    text = """
import sys
sys.modules["accelerate"] = None  # as if it were not installed
import flowstone as fs
try:
    import flowstone.adapters.huggingface
except fs.FrameworkError as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    stdout = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    assert stdout == "accelerate is not installed\n  next        pip install accelerate\n"


def test_deepspeed_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(fs.FrameworkError, match=r"deepspeed is not installed\n  next +pip install deepspeed=="):
        attach(object())


def test_a_framework_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fs.FrameworkError, match="sundial is not installed"):
        FRAMEWORK.load("sundial.hands")
    with pytest.raises(fs.FrameworkError, match=r"json.hands cannot be imported\n  found +ModuleNotFoundError: "):
        SupportedFramework("sundial", "sundial", ("1.0",)).load("json.hands")


class Sundial:
    def read(self, hour: int, minute: int = 0) -> None: ...

    def turn(self, degrees: float, *more: float, slowly: bool = True) -> None: ...


def test_an_unknown_version_goes_on_only_with_the_same_interface(caplog: pytest.LogCaptureFixture) -> None:
    FRAMEWORK.check("1.2", {"gone": ("a",)}, Sundial)
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        FRAMEWORK.check("2.0", {"read": ("hour",), "turn": ("degrees",)}, Sundial)
    assert "was not tested with sundial 2.0" in caplog.text
    assert "(tested: 1.0, 1.2)" in caplog.text
    with pytest.raises(fs.FrameworkError) as caught:
        FRAMEWORK.check("2.0", {"read": (), "turn": ("degrees",), "set": ("hour",)}, Sundial)
    assert "pip install sundial==1.2" in str(caught.value)
    changed = str(caught.value.facts["changed"]).splitlines()
    assert changed == ["Sundial.read(hour, minute), expected ()", "Sundial.set does not exist"]


def test_parameters_that_calls_of_the_known_form_no_longer_reach_are_told() -> None:
    class Newer:
        def read(self, hour: int, *, minute: int = 0) -> None: ...

        def turn(self, degrees: float, *, slowly: bool) -> None: ...

        def set(self, hour: int, *more: int, minute: int = 0, **named: int) -> None: ...

    methods = {"read": ("hour", "minute"), "turn": ("degrees",), "set": ("hour",)}
    with pytest.raises(fs.FrameworkError) as caught:
        FRAMEWORK.check("2.0", methods, Newer)
    assert str(caught.value.facts["changed"]).splitlines() == [
        "Newer.read(hour, *, minute), expected (hour, minute)",
        "Newer.turn(degrees, *, slowly), expected (degrees)",
    ]


def test_flowstone_by_itself_imports_no_adapter() -> None:
    text = (
        "import sys, flowstone, flowstone.checkpointer; "
        "print([one for one in sys.modules if one.startswith('flowstone.adapters')])"
    )
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "[]\n"
