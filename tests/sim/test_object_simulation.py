"""A job is cut off from its bucket, at each request; then the promises of docs/ORDERING.md hold.

test_store_simulation.py cuts at calls of the store. This one cuts within them: between a claim and its segment, between
a copy and the removal of its source, in the lease. The bucket is obstore's in memory; a real server tests the further
behaviour of S3 (tests/store/test_object_faults.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from unittest import mock

import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore as Bucket
from test_store_simulation import OPTIONS, SCENARIOS, Scenario, Told, _check_steps, _save, _saves, _state

import flowstone as fs
from flowstone.commit.entries import EntryKind, parse_entry
from flowstone.errors import FlowstoneError, LockedError, StepExistsError, StorageError
from flowstone.store.objects.client import RetryPolicy
from flowstone.store.objects.store import ObjectStore
from flowstone.store.objects.uploads import Upload

IMPATIENT = RetryPolicy(budget_s=0.0, first_delay_s=0.0)
PATIENT = RetryPolicy(budget_s=5.0, first_delay_s=0.001)


@dataclass(slots=True, eq=False)
class CutBucket:
    """A bucket that is out of reach from request number `at` on, or for that one alone; `after`: once it is done."""

    inner: Bucket
    at: int | None = None
    after: bool = False
    for_ever: bool = True
    count: int = 0
    guard: threading.Lock = field(default_factory=threading.Lock)

    def __getattr__(self, verb: str) -> Callable[..., object]:
        act = getattr(self.inner, verb)

        def request(*given: object, **named: object) -> object:
            with self.guard:
                number, self.count = self.count, self.count + 1
            is_cut = number == self.at
            if self.at is not None and ((is_cut and not self.after) or (number > self.at and self.for_ever)):
                raise GenericError("error performing a request: out of reach")
            result = act(*given, **named)
            if is_cut:
                raise GenericError("error performing a request: the answer is lost")
            return result

        return request


@pytest.fixture(autouse=True)
def _dead_processes() -> Iterator[None]:
    """Each job that comes later finds that the one before is gone; nobody renews a lease while requests are counted."""
    gone = f"{2**22 - 1} 1"
    with (
        mock.patch("flowstone.store.holders.machine_and_process", return_value=("this machine", gone)),
        mock.patch("flowstone.store.objects.lease.LEASE_S", 600.0),
    ):
        yield


def opened(bucket: object, patience: RetryPolicy = PATIENT) -> ObjectStore:
    return ObjectStore(bucket, location="bucket", patience=patience, lease_s=600.0)  # type: ignore[arg-type]


def play(scenario: Scenario, cut: CutBucket, *, patience: RetryPolicy) -> None:
    events = Told()
    with fs.Checkpointer(opened(cut.inner), **OPTIONS) as earlier:  # type: ignore[arg-type]
        _saves(*scenario.before)(earlier, events)
    checkpointer = fs.Checkpointer(
        opened(cut, patience), keep=scenario.keep, on_error="continue", **OPTIONS,  # type: ignore[arg-type]
    )
    with suppress(StorageError, StepExistsError, LockedError):
        scenario.act(checkpointer, events)
    with suppress(FlowstoneError):
        checkpointer.close()
    check(cut.inner, events, scenario.keep)


def check(bucket: Bucket, events: Told, keep: int | None) -> None:
    store = opened(bucket)
    _check_steps(store, events)  # type: ignore[arg-type]
    step = 1 + max([*events.begun, 0])
    with fs.Checkpointer(store, keep=keep, **OPTIONS) as after:  # type: ignore[arg-type]
        _save(after, events, step)
        after.wait()
        assert after.load(_state(0)).step == step
    _check_steps(store, events)  # type: ignore[arg-type]
    for name in store.names():
        entry = parse_entry(name)
        assert entry is None or entry.leftover is None, f"the next writer has not swept {name}"
        if entry is not None and entry.kind is EntryKind.STEP:
            assert store.exists(f"{name}/manifest.json"), f"the next writer has not swept {name}"


def cut_everywhere(name: str, mode: str, first: int = 0, by: int = 1) -> int:
    """Cut at each `by`th request from `first` on. How many requests there were in all."""
    scenario = SCENARIOS[name]
    whole = CutBucket(Bucket())
    play(scenario, whole, patience=PATIENT)
    for offset in range(first, whole.count, by):
        cut = CutBucket(Bucket(), offset, after=mode != "before", for_ever=mode != "once")
        try:
            play(scenario, cut, patience=PATIENT if mode == "once" else IMPATIENT)
        except AssertionError as error:
            raise AssertionError(f"cut {mode} request {offset} of {name}: {error}") from error
    return whole.count


@pytest.mark.parametrize(("mode", "first"), [("before", 0), ("after", 1), ("once", 2)])
def test_a_job_that_is_cut_off_at_a_request_leaves_the_previous_step_or_the_new_one(mode: str, first: int) -> None:
    """Each request in one of the ways; the next test has all in each."""
    assert cut_everywhere("second_save", mode, first, by=3) > 20


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["before", "after", "once"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_so_does_one_that_is_cut_off_at_any_request_of_anything(name: str, mode: str) -> None:
    assert cut_everywhere(name, mode) > 20


def test_a_segment_that_is_never_sent_is_found_out() -> None:
    """The simulation can fail: here a segment stays the empty claim that it began with."""
    with (
        mock.patch.object(Upload, "_put", lambda self, stream, size: [None for _ in stream]),
        pytest.raises((AssertionError, FlowstoneError)),
    ):
        cut_everywhere("second_save", "before")
