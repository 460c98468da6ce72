"""Late captures are collapsed into huge pages between saves, and stay exact, across tensors and with options."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import flowstone as fs
import sandbox
from flowstone import _native, cli
from flowstone.config import MIB
from flowstone.events.phases import Captured, Event
from flowstone.events.rare_events import PagesCollapsed, Prepared
from flowstone.save.pacing import Captures
from flowstone.save.saves import Saves
from flowstone.store.base import Pace
from own_process import run_in_own_process, warnings_heard

REFUSAL = _native.collapse_refusal()
pytestmark = pytest.mark.skipif(bool(REFUSAL), reason=f"nothing is collapsed here: {REFUSAL}")

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGES_FOR_ALL = MODE.exists() and "[always]" in MODE.read_text("ascii")
TENSOR_BYTES = 2_800_000  # of a mean tensor: less than two huge pages


@pytest.fixture(autouse=True)
def whole_speed() -> Iterator[None]:
    """A pass rests for seven eighths of its time; here it does not."""
    with mock.patch("flowstone.save.collapsing.COLLAPSE_SHARE", 1.0):
        yield


def small_pages(count: int, numbers: int) -> list[torch.Tensor]:
    """So many tensors, one behind the other with 16 bytes in between, as an allocator has them, in new memory.

    The system's own thread may collapse some of it at any time where huge pages are chosen for all memory, and where
    they are asked for; so they are asked for only where nothing else allows them again.
    """
    stride = 4 * numbers + 16
    memory = mmap.mmap(-1, count * stride, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if HUGE_PAGES_FOR_ALL:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    if HUGE_PAGES_FOR_ALL:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return [whole[index * stride :][: 4 * numbers].view(torch.float32).uniform_() for index in range(count)]


def training(count: int = 12) -> dict[str, object]:
    """Parameters and their moments: three times `count` tensors."""
    made = [tensor.view(-1, 7) for tensor in small_pages(3 * count, TENSOR_BYTES // 4)]
    model = nn.ParameterList([nn.Parameter(tensor) for tensor in made[:count]])
    optimizer = torch.optim.AdamW(model.parameters())
    for index, parameter in enumerate(model.parameters()):
        moments = {"exp_avg": made[count + index], "exp_avg_sq": made[2 * count + index]}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return {"model": model, "optimizer": optimizer}


def parameters(state: dict[str, object]) -> list[nn.Parameter]:
    return list(state["model"].parameters())  # type: ignore[attr-defined]


def pass_of(checkpointer: fs.Checkpointer) -> _native.Collapse | None:
    """The pass that has begun, if any, once all saves so far have ended."""
    saves = checkpointer._saves
    assert isinstance(saves, Saves)
    checkpointer.wait()
    saves._threads.writer.submit(int).result()  # a pass begins behind the commit
    return saves.collapsing._pass


def await_pass(checkpointer: fs.Checkpointer) -> None:
    current = pass_of(checkpointer)
    assert current is not None, "a pass has begun"
    assert current.wait(60)


def opened(path: Path, events: list[Event], **options: object) -> fs.Checkpointer:
    engine = fs.EngineOptions(request_bytes=2 * MIB, **options)  # type: ignore[arg-type]
    return fs.Checkpointer(
        path, engine=engine, on_event=events.append, on_error="continue", budget_bytes=64 * MIB, keep=fs.Keep(last=1)
    )


def test_after_the_first_save_what_is_watched_is_in_huge_pages_and_still_exact(tmp_path: Path) -> None:
    state, events = training(), list[Event]()
    size = 3 * 12 * TENSOR_BYTES
    with opened(tmp_path, events) as checkpointer:
        io = checkpointer.save(0, state).committed.result().manifest.io
        assert (io.huge_bytes or 0) < 0.2 * size
        await_pass(checkpointer)
        io = checkpointer.save(1, state).committed.result().manifest.io
        assert (io.exact_bytes, io.sampled_bytes) == (size, 0)
        assert (io.huge_bytes or 0) > 0.9 * size
        await_pass(checkpointer)
        with mock.patch.object(Captures, "pace", return_value=Pace(blocks=1, bytes_per_s=1)):
            for seed in range(6):
                chance = random.Random(seed)
                tensor = chance.choice(parameters(state)[1:])
                if seed % 3 == 2:
                    tensor = state["optimizer"].state[tensor]["exp_avg"]  # type: ignore[attr-defined]
                row = chance.randrange(len(tensor))
                save = checkpointer.save(2 + seed, state)
                if seed % 3 == 1:
                    tensor.detach().numpy()[row] += 1
                else:
                    tensor.data[row] += 1
                checkpointer.fence()
                assert isinstance(save.committed.exception(60), fs.StateChangedError), seed
        checkpointer.save(99, state).committed.result().verify()
    assert "% in huge pages)" in " ".join(CliRunner().invoke(cli.app, ["show", str(tmp_path)]).stdout.split())
    first, *_, last = (event for event in events if isinstance(event, PagesCollapsed))
    assert (first.step, first.bytes) == (0, size)
    assert first.huge_bytes >= (io.huge_bytes or 0)
    assert first.collapsed_bytes > 0.8 * first.huge_bytes
    assert first.processor_s > 0
    assert "share 2 MiB with other memory" in first.reason
    assert last.huge_bytes > 0.9 * size
    assert [event.huge_bytes > 0.9 * size for event in events if isinstance(event, Captured)][:2] == [False, True]


def test_what_prepare_has_collapsed_is_in_huge_pages_at_the_first_save(tmp_path: Path) -> None:
    state, events = training(), list[Event]()
    with opened(tmp_path, events) as checkpointer:
        checkpointer.prepare(state)
        assert isinstance(events[0], Prepared)
        await_pass(checkpointer)
        io = checkpointer.save(1, state).committed.result().manifest.io
        assert (io.huge_bytes or 0) > 0.9 * 3 * 12 * TENSOR_BYTES
    assert next(event for event in events if isinstance(event, PagesCollapsed)).step is None


@pytest.mark.parametrize("options", [{"collapse": False}, {"watch": "samples"}], ids=str)
def test_memory_is_left_as_it_is_where_that_is_chosen(tmp_path: Path, options: dict[str, object]) -> None:
    state, events = training(), list[Event]()
    with opened(tmp_path, events, **options) as checkpointer:
        for step in range(3):
            io = checkpointer.save(step, state).committed.result().manifest.io
            assert pass_of(checkpointer) is None
        assert (io.exact_bytes == 0) == ("watch" in options)
    assert not any(isinstance(event, PagesCollapsed) for event in events)


def test_a_small_state_is_left_as_it_is(tmp_path: Path) -> None:
    with opened(tmp_path, []) as checkpointer:
        checkpointer.save(1, training(2)).committed.result()
        assert pass_of(checkpointer) is None


def test_copies_that_are_made_for_one_save_are_not_collapsed_and_what_stays_is(tmp_path: Path) -> None:
    """With a fence of the caller's everything is captured late, temporary tensors too."""
    (kept,), events = small_pages(1, 20 * MIB), list[Event]()
    with opened(tmp_path, events) as checkpointer:
        made = []
        for step in range(3):
            made += small_pages(1, 20 * MIB)  # elsewhere at each save
            save = checkpointer.save(step, {"kept": kept, "made": made[-1]}, fence="manual")
            checkpointer.fence()
            save.committed.result()
            if step > 0:
                await_pass(checkpointer)
    passes = [event for event in events if isinstance(event, PagesCollapsed)]
    assert [event.step for event in passes] == [1, 2]
    assert all(event.bytes == kept.nbytes for event in passes)


def test_a_save_ends_the_pass_under_way_and_the_next_one_goes_on(tmp_path: Path) -> None:
    state, events = training(), list[Event]()
    with opened(tmp_path, events) as checkpointer:
        with mock.patch("flowstone.save.collapsing.COLLAPSE_SHARE", 1e-9):  # it rests after each huge page
            checkpointer.save(0, state).committed.result()
            current = pass_of(checkpointer)
            assert current is not None
            assert not current.wait(0.2)
        checkpointer.save(1, state).committed.result()
        await_pass(checkpointer)
    first, second = (event for event in events if isinstance(event, PagesCollapsed))
    assert first.collapsed_bytes == 2 * MIB
    assert "were not reached" in first.reason
    assert second.huge_bytes > 0.9 * second.bytes


def test_no_pass_begins_while_a_later_save_captures_and_one_does_after_it(tmp_path: Path) -> None:
    """What a save watches would be refused, and refusals make tries rare."""
    state, events = training(24), list[Event]()
    with opened(tmp_path, events) as checkpointer:
        first = checkpointer.save(0, state)
        with mock.patch.object(Captures, "pace", return_value=Pace(blocks=1, bytes_per_s=1)):
            second = checkpointer.save(1, state)
        committed = threading.Event()  # `result` would end the pace
        first.committed.add_done_callback(lambda _: committed.set())
        assert committed.wait(60)
        second.committed.result()
        await_pass(checkpointer)
    passes = [event for event in events if isinstance(event, PagesCollapsed)]
    assert not any("were refused" in event.reason for event in passes)
    assert passes[-1].step == 1
    assert passes[-1].huge_bytes > 0.9 * passes[-1].bytes


def test_a_script_that_ends_without_close_does_not_wait_for_a_pass(tmp_path: Path) -> None:
    assert run_in_own_process(_never_closed, tmp_path) == "saved"
    assert fs.open(tmp_path).step == 0


def _never_closed(path: Path) -> str:
    with mock.patch("flowstone.save.collapsing.COLLAPSE_SHARE", 1e-9):
        _KEPT.append(opened(path, []))
        _KEPT[-1].save(0, training()).committed.result()
        assert pass_of(_KEPT[-1]) is not None
    return "saved"


_KEPT: list[fs.Checkpointer] = []  # until the process ends


@pytest.mark.skipif(not sandbox.HAS_SECCOMP, reason="no seccomp filters here")
def test_close_and_the_process_end_where_the_system_never_returns_from_a_collapse(tmp_path: Path) -> None:
    (collapsed,), (warning,) = run_in_own_process(_suspended, tmp_path)
    assert (collapsed.step, collapsed.bytes, collapsed.huge_bytes) == (0, 3 * 12 * TENSOR_BYTES, 0)
    assert "the system has not finished a huge page in 0.01 s" in collapsed.reason
    assert "cannot be stopped" in warning
    assert fs.open(tmp_path).step == 2


def _suspended(path: Path) -> tuple[list[Event], list[str]]:
    state, events = training(), list[Event]()
    await_call = sandbox.suspend("madvise", third=25)  # MADV_COLLAPSE
    wait = mock.patch("flowstone.save.collapsing._ENDS_S", 0.01)
    with wait, warnings_heard() as heard, opened(path, events) as checkpointer:
        checkpointer.save(0, state).committed.result()
        await_call()
        for step in (1, 2):  # after the first one's commit no pass begins any more
            checkpointer.save(step, state).committed.result()
            assert pass_of(checkpointer) is None
    return [event for event in events if isinstance(event, PagesCollapsed)], heard


def _refused(path: Path, code: int) -> tuple[object, ...]:
    state, events = training(), list[Event]()
    sandbox.refuse("madvise", code)
    ios = []
    with opened(path, events) as checkpointer:
        for step in range(6):
            ios.append(checkpointer.save(step, state).committed.result().manifest.io)
            if (current := pass_of(checkpointer)) is not None:
                current.wait(60)
    passes = [event for event in events if isinstance(event, PagesCollapsed)]
    exact = {(io.exact_bytes, io.sampled_bytes) for io in ios}
    return exact, [event.step for event in passes], [event.collapsed_bytes for event in passes], passes[0].reason


@pytest.mark.skipif(not sandbox.HAS_SECCOMP, reason="no seccomp filters here")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM, errno.EAGAIN])
def test_where_the_system_refuses_the_watch_is_exact_in_small_pages_and_tries_become_rare(
    tmp_path: Path, code: int
) -> None:
    """EINVAL: before Linux 6.1; ENOMEM: no huge page is to be had, or the control group's limit is reached."""
    exact, steps, collapsed, reason = run_in_own_process(_refused, tmp_path, code)
    assert exact == {(3 * 12 * TENSOR_BYTES, 0)}
    assert steps == [0, 2]  # the next one would be after step 6
    assert collapsed == [0, 0]
    assert f"were refused huge pages ({os.strerror(code)})" in str(reason)


def test_where_huge_pages_are_switched_off_nothing_is_tried_and_that_is_told_once(tmp_path: Path) -> None:
    state, events = training(), list[Event]()
    off = mock.patch.object(_native, "collapse_refusal", return_value="huge pages are switched off here")
    with off, opened(tmp_path, events) as checkpointer:
        for step in range(3):
            io = checkpointer.save(step, state).committed.result().manifest.io
            assert io.sampled_bytes == 0
    passes = [event for event in events if isinstance(event, PagesCollapsed)]
    assert [(event.step, event.collapsed_bytes, event.reason) for event in passes] == [
        (0, 0, "huge pages are switched off here")
    ]


def test_memory_that_is_freed_and_taken_anew_meanwhile_keeps_its_content(tmp_path: Path) -> None:
    with opened(tmp_path, []) as checkpointer:
        for step in range(4):
            state = training()  # the state before is freed while its pass is under way
            checkpointer.save(step, state).committed.result()
            expected = [parameter.detach().numpy().copy() for parameter in parameters(state)]
            made = [np.full(TENSOR_BYTES // 4, step, np.float32) for _ in range(12)]
            assert all((array == step).all() for array in made)
            pairs = zip(parameters(state), expected, strict=True)
            assert all(np.array_equal(parameter.detach().numpy(), value) for parameter, value in pairs)
