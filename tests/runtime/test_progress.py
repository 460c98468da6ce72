"""Progress on a terminal: after a second, as a bar that disappears; elsewhere nothing."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from flowstone.runtime.progress import terminal_progress, terminal_steps

SHOW_CURSOR = "\x1b[?25h"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, quiet_for_s: float = 0.0) -> Terminal:
    """Called in the test itself: pytest has standard error of its own before each one."""
    terminal = Terminal()
    monkeypatch.setattr("flowstone.runtime.progress._QUIET_FOR_S", quiet_for_s)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def test_bytes_are_shown_with_their_total_and_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stdout, threads = on_a_terminal(monkeypatch), sys.stdout, threading.active_count()
    with terminal_progress("loading step 3") as show:
        show(10**9, 4 * 10**9)
        assert (sys.stdout, threading.active_count()) == (stdout, threads)
    text = terminal.getvalue()
    assert "1.0/4.0 GB" in text
    assert "loading step 3" in text


def test_names_of_steps_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with terminal_steps() as show:
        show("read [red]", 3, 20)
    assert " 3/20" in terminal.getvalue()
    assert "read [red]" in terminal.getvalue()


def test_the_cursor_comes_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)

    def fail() -> None:
        with terminal_progress("packing") as show:
            show(1, 2)
            assert SHOW_CURSOR not in terminal.getvalue()
            raise OSError

    with pytest.raises(OSError, match=r"^$"):
        fail()
    assert SHOW_CURSOR in terminal.getvalue()


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch, quiet_for_s=60.0)
    with terminal_progress("packing") as show:
        show(2, 2)
    assert terminal.getvalue() == ""


def test_a_pipe_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.runtime.progress._QUIET_FOR_S", 0.0)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with terminal_progress("packing") as show:
        show(1, 2)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
