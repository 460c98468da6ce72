"""Several threads at one Checkpointer, and nested calls: they wait for the lock, or are refused at once."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import flowstone as fs

Script = Callable[..., "subprocess.Popen[str]"]
PATIENCE_S = 60  # for what is to happen at once; a thread that never ends fails its test all the same


def within_patience(act: Callable[[], object]) -> object:
    """What `act` gives or raises, on a thread of its own, with a limit on the wait."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(act())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert outcome, "still waiting"
    return outcome[0]


class Talkative:
    """An object of the state whose state_dict() does something first."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def state_dict(self) -> dict[str, object]:
        self.act()
        return {}

    def load_state_dict(self, tree: dict[str, object]) -> None:
        self.act()


def test_threads_that_save_through_one_checkpointer_wait_for_each_other(store: Path) -> None:
    state = {"x": torch.ones(1 << 12)}
    begun = threading.Barrier(3)
    saved: list[int] = []
    committed: list[int] = []

    def told(event: fs.Event) -> None:
        if isinstance(event, fs.Committed):
            committed.append(event.step)

    def save_every_third(first: int) -> None:
        begun.wait(PATIENCE_S)
        for step in range(first, 60, 3):
            try:
                saved.append(checkpointer.save(step, state).committed.result().step)
                checkpointer.latest()
            except fs.StepExistsError:
                pass  # another thread was faster

    with fs.Checkpointer(store, on_event=told) as checkpointer, ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(save_every_third, first) for first in range(3)]:
            done.result()
    assert committed == sorted(saved)
    assert committed[-1] == 59
    assert fs.open(store).verify().step == 59


VERBS: dict[str, Callable[[fs.Checkpointer], object]] = {
    "save": lambda it: it.save(9, {"x": 1}),
    "load": lambda it: it.load({"x": 1}),
    "latest": lambda it: it.latest(),
    "wait": lambda it: it.wait(),
    "rewind": lambda it: it.rewind(1),
    "close": lambda it: it.close(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_call_inside_of_a_call_is_refused_at_once(store: Path, verb: str) -> None:
    def nested() -> None:
        with pytest.raises(fs.BusyError) as caught:
            VERBS[verb](checkpointer)
        assert caught.value.message.startswith(f"{verb}() was called inside of save() of the same Checkpointer")
        assert caught.value.facts["next"] == f"set a flag there, and call {verb}() once save() has returned"

    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": Talkative(nested)}).committed.result()
        assert checkpointer.latest() is not None, "and nothing is spoilt by it"


@pytest.mark.parametrize("verb", [*VERBS, "fence"])
def test_a_call_from_on_event_of_a_background_thread_is_refused_at_once(store: Path, verb: str) -> None:
    refused: list[BaseException] = []

    def on_event(event: fs.Event) -> None:
        if isinstance(event, fs.Committed):
            try:
                (VERBS | {"fence": lambda it: it.fence()})[verb](checkpointer)
            except fs.BusyError as error:
                refused.append(error)

    checkpointer = fs.Checkpointer(store, on_event=on_event)
    step = within_patience(lambda: checkpointer.save(1, {"x": torch.ones(3)}).committed.result().step)
    assert step == 1
    assert str(refused[0]).startswith(f"{verb}() was called on a thread that finishes saves: from on_event, or from a")
    checkpointer.close()


def test_a_call_from_a_futures_callback_is_refused_at_once(store: Path) -> None:
    refused: list[object] = []
    checkpointer = fs.Checkpointer(store)
    begin = threading.Event()

    def call_back(_: object) -> None:
        try:
            checkpointer.latest()
        except fs.BusyError as error:
            refused.append(error)

    def save() -> int:
        checkpointer.save(1, {"x": torch.ones(3)}).committed.result()
        checkpointer._saves._threads.writer.submit(begin.wait, PATIENCE_S)
        save = checkpointer.save(2, {"x": torch.ones(3)})
        save.committed.add_done_callback(call_back)
        begin.set()
        return save.committed.result().step

    assert within_patience(save) == 2
    checkpointer.wait()
    assert len(refused) == 1
    checkpointer.close()


def test_a_step_of_another_thread_waits_until_save_has_described_the_state(store: Path) -> None:
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside, proceed, stepped = threading.Event(), threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        assert proceed.wait(PATIENCE_S)

    def step() -> None:
        model(torch.ones(256)).sum().backward()
        optimizer.step()
        stepped.set()

    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state)  # from now on steps know of the Checkpointer
        step()
        expected = model.weight.detach().clone()
        stepped.clear()
        saver = threading.Thread(target=checkpointer.save, args=(2, state | {"stays": Talkative(stay)}))
        saver.start()
        assert inside.wait(PATIENCE_S)
        trainer = threading.Thread(target=step)
        trainer.start()
        assert not stepped.wait(0.05), "the state changed while it was described"
        proceed.set()
        saver.join()
        trainer.join()
        assert stepped.is_set()
    assert torch.equal(fs.open(store, 2).read("model.weight"), expected)


_FORKED_INSIDE = """
import os, sys, threading, flowstone as fs
inside, over = threading.Event(), threading.Event()
class Slow:
    def state_dict(self):
        inside.set()
        over.wait(60)
        return {}
    def load_state_dict(self, tree): ...
checkpointer = fs.Checkpointer(sys.argv[1])
saver = threading.Thread(target=checkpointer.save, args=(1, {"x": Slow()}))
saver.start()
inside.wait(60)
child = os.fork()
if not child:
    try:
        checkpointer.latest()
    except fs.ClosedError:
        checkpointer.close()
        os._exit(7)
over.set()
saver.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
checkpointer.close()
"""


def test_a_fork_while_another_thread_saves_does_not_wait_for_that_thread(store: Path, warm_script: Script) -> None:
    out, err = warm_script(_FORKED_INSIDE, store).communicate(timeout=PATIENCE_S)
    assert out == "7\n", err
    assert fs.open(store).step == 1


def test_waiting_for_another_save_in_a_callback_or_an_event_is_an_error_at_once(store: Path) -> None:
    """Saves are finished one after the other, on the thread that calls it: it would wait for itself."""
    state, reported, both = {"x": torch.ones(1 << 16)}, [], threading.Event()

    def wait_for_the_second(_: object) -> None:
        second = saves[1].committed
        with pytest.raises(TimeoutError):
            second.result(0)  # a look, no wait
        for act in (second.result, second.exception, lambda: second.result(60), saves[1].captured.result):
            try:
                reported.append(act())
            except fs.BusyError as error:
                reported.append(error)

    def hear(event: fs.Event) -> None:
        if isinstance(event, fs.Written) and event.step == 1:
            assert both.wait(PATIENCE_S)
            wait_for_the_second(event)

    with fs.Checkpointer(store, on_event=hear) as checkpointer:
        saves = [checkpointer.save(1, state)]
        saves[0].committed.add_done_callback(wait_for_the_second)
        saves.append(checkpointer.save(2, state))
        both.set()
        within_patience(checkpointer.wait)
    assert [type(event) for event in reported] == [fs.BusyError, fs.BusyError, fs.BusyError, type(None)] * 2, reported
    assert "from a callback of a Future" in str(reported[0])
    assert saves[1].committed.result().step == 2
