"""The first agreement shows which Checkpointers belong together, and a missing one is reported in time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
from threads import Clock, Job

from flowstone.errors import RankError
from flowstone.ranks import Agreement, Decision, Timeouts, exchange
from flowstone.ranks.agreement import AgreementResult
from flowstone.ranks.exchange import Exchange
from flowstone.ranks.heartbeat import Activity, Heartbeat

pytestmark = pytest.mark.usefixtures("impatient")
SIZE = 3


class Checkpointers:
    """One of each rank, or of some, as far as they agree: what each is used for, as its heartbeat tells it."""

    def __init__(self, job: Job, label: str = "runs/gpt", ranks: Sequence[int] = range(SIZE), **options: float) -> None:
        self.activity = dict.fromkeys(ranks, Activity())
        self.heartbeats = {
            rank: Heartbeat(
                job.kv_stores[rank], rank, label, lambda rank=rank: self.activity[rank],  # type: ignore[misc]
                every_s=0.05
            )
            for rank in ranks
        }
        self.sides = {
            rank: Agreement(
                job.kv_stores[rank], rank, job.size, label=label, heartbeat=heartbeat,  # type: ignore[arg-type]
                timeouts=Timeouts(**options)
            )
            for rank, heartbeat in self.heartbeats.items()
        }

    def close(self, rank: int) -> None:
        self.heartbeats[rank].close()

    def stop(self) -> None:
        for heartbeat in self.heartbeats.values():
            heartbeat.stop()


@contextmanager
def opened(job: Job, *args: object, **options: object) -> Iterator[Checkpointers]:
    made = Checkpointers(job, *args, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.stop()


def everybody(messages: Sequence[bytes]) -> Decision:
    return Decision(b",".join(messages))


def agree(
    job: Job, made: Checkpointers, phase: str, ranks: Sequence[int] = range(SIZE)
) -> list[AgreementResult | RankError]:
    return job.run(lambda own: made.sides[own.rank].agree(phase, f"{own.rank}".encode(), everybody), ranks=list(ranks))


def test_one_checkpointer_more_on_one_rank_breaks_nothing() -> None:
    """Made and never used; used by one rank alone; made before the shared ones, and between their calls."""
    job = Job(SIZE)
    together = [AgreementResult(b"0,1,2", b"")] * SIZE
    with opened(job, ranks=[0]), opened(job) as shared:
        assert agree(job, shared, "which step to load") == together
        with opened(job, ranks=[1], deadline_s=0.2) as alone:
            assert isinstance(agree(job, alone, "which step is the newest", [1])[0], RankError)
            assert agree(job, shared, "the plan of step 1") == together
        with opened(job) as another:
            assert agree(job, another, "which step to load") == together
            assert agree(job, shared, "the plan of step 2") == together


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("first", [False, True])
def test_a_call_that_other_ranks_do_not_make_is_passed_over(rank: int, first: bool) -> None:
    """`if rank == 0: ckpt.latest()` fails, and is over then: the calls that all ranks make meet each other."""
    job = Job(SIZE)
    with opened(job, deadline_s=0.3) as made:
        if not first:
            agree(job, made, "the plan of step 1")
        for _ in range(2):
            error = agree(job, made, "which step is the newest", [rank])[0]
            assert isinstance(error, RankError)
            assert "'which step is the newest'" in str(error)
        for step in (2, 3):
            assert agree(job, made, f"the plan of step {step}") == [AgreementResult(b"0,1,2", b"")] * SIZE


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_missed_a_call_is_met_in_the_next_one_of_the_same_verb(rank: int) -> None:
    """All ask what is newest, again and again; but one is kept from the first of these calls by an exception."""
    job = Job(SIZE)
    others = [other for other in range(SIZE) if other != rank]
    with opened(job, deadline_s=0.3) as made:
        agree(job, made, "the plan of step 1")
        for error in agree(job, made, "which step is the newest", others):
            assert isinstance(error, RankError)
        for _ in range(2):
            assert agree(job, made, "which step is the newest") == [AgreementResult(b"0,1,2", b"")] * SIZE


def saved(
    job: Job, made: Checkpointers, step: int, ranks: Sequence[int] = range(SIZE)
) -> list[AgreementResult | RankError]:
    return job.run(
        lambda rank: made.sides[rank.rank].agree(
            f"the plan of step {step}", f"{rank.rank}".encode(), everybody, position=step
        ),
        ranks=list(ranks),
    )


def out_of_step(job: Job, made: Checkpointers) -> list[RankError]:
    """Rank 0 alone saves a step, and rank 1 alone an older one; rank 2 comes to neither."""
    def save(entry: Agreement) -> AgreementResult:
        step = 5 - entry.rank
        return made.sides[entry.rank].agree(f"the plan of step {step}", b"", everybody, position=step)

    each = job.run(save, ranks=[0, 1])
    assert all("rank 1 is in 'the plan of step 4' while rank 0 is in 'the plan of step 5'" in str(end) for end in each)
    return each


def refused(job: Job, made: Checkpointers) -> list[RankError]:
    """Rank 1 tells that it does not save a step, and rank 2 does not come to it."""
    results = job.run(
        lambda rank: made.sides[rank.rank].agree(
            "the plan of step 5", OSError("made up") if rank.rank else b"", everybody, position=5
        ),
        ranks=[0, 1],
    )
    assert all("made up" in str(result) for result in results)
    return results


@pytest.mark.parametrize("given_up", [out_of_step, refused])
def test_what_others_gave_up_before_a_rank_came_is_not_its_own_whatever_was_wrong_with_it(
    given_up: Callable[[Job, Checkpointers], list[RankError]]
) -> None:
    """That a rank was missing is not what they were told: there was something worse. The next save of all works."""
    job = Job(SIZE)
    with opened(job, deadline_s=0.3) as made:
        agree(job, made, "the plan of step 3")
        given_up(job, made)
        for step in (6, 7):
            assert saved(job, made, step) == [AgreementResult(b"0,1,2", b"")] * SIZE


def test_who_comes_as_it_is_being_given_up_is_met_in_the_next_call() -> None:
    """Rank 0 waits for rank 2 no more, and is about to tell what it has heard: rank 2 posts into that, unheard."""
    job = Job(SIZE)
    claim, come = Exchange.claim_decision, threading.Event()

    def slow_claim(entry: Exchange) -> bool:
        come.set()
        while not entry._mailbox.is_posted(entry._message_key(2)):
            time.sleep(0.001)
        return claim(entry)

    def late(reported: list[AgreementResult | RankError]) -> None:
        assert come.wait(60)
        reported.extend(saved(job, made, 6, [2]))

    with opened(job, deadline_s=0.3) as made:
        agree(job, made, "the plan of step 3")
        collected: list[AgreementResult | RankError] = []
        thread = threading.Thread(target=late, args=[collected])
        thread.start()
        with mock.patch.object(Exchange, "claim_decision", slow_claim):
            out_of_step(job, made)
        collected[:0] = saved(job, made, 6, [0, 1])
        thread.join()
    assert collected == [AgreementResult(b"0,1,2", b"")] * SIZE


@pytest.mark.parametrize("step", [4, 5])
def test_who_comes_late_to_what_others_gave_up_out_of_step_learns_that_of_its_own_call(step: int) -> None:
    """Its save is one of those, or older: it does not wait for others to come to it once more."""
    job = Job(SIZE)
    with opened(job, deadline_s=0.3) as made:
        agree(job, made, "the plan of step 3")
        first = out_of_step(job, made)[0]
        error = saved(job, made, step, [2])[0]
        assert isinstance(error, RankError)
        assert (str(error), error.ahead) == (str(first), 5)
        assert saved(job, made, 6) == [AgreementResult(b"0,1,2", b"")] * SIZE


def test_two_stores_are_told_apart_whoever_comes_first() -> None:
    job = Job(SIZE)
    begun = [threading.Event() for _ in range(SIZE)]
    with opened(job, "runs/a") as first, opened(job, "runs/b") as second:
        def come(rank: int, number: int) -> bytes:
            made = (first, second)[number ^ (rank == 1)]
            if number == 0:
                begun[rank].set()
            else:  # the others come to their first meanwhile
                assert all(thread.wait(60) for thread in begun)
            return made.sides[rank].agree("the plan of step 1", b"a" if made is first else b"b", everybody).common

        acts = [partial(come, rank, number) for rank in range(SIZE) for number in range(2)]
        assert job.run_all(acts) == [b"a,a,a", b"b,b,b", b"b,b,b", b"a,a,a", b"a,a,a", b"b,b,b"]


def test_two_checkpointers_of_one_store_meet_one_after_the_other() -> None:
    """As where the first save of one is planned beside training, and another one loads meanwhile."""
    job = Job(SIZE)
    with opened(job) as first, opened(job) as second:
        def both(rank: int) -> list[AgreementResult]:
            return [
                first.sides[rank].agree("the plan of step 1", b"x", everybody),
                second.sides[rank].agree("which step to load", b"y", everybody),
            ]

        acts = [partial(both, rank) for rank in range(SIZE)]
        assert job.run_all(acts) == [[AgreementResult(b"x,x,x", b""), AgreementResult(b"y,y,y", b"")]] * SIZE


def failure(reported: Sequence[AgreementResult | RankError]) -> RankError:
    error = reported[0]
    assert isinstance(error, RankError)
    assert all(str(event) == str(error) for event in reported)
    assert "alone=True" in str(error)
    return error


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_has_closed_its_checkpointer_is_not_waited_for(met: bool, gone: int) -> None:
    job = Job(SIZE)
    others = [rank for rank in range(SIZE) if rank != gone]
    with mock.patch.object(exchange, "UNANSWERED_S", 0.1), opened(job) as made:
        if met:
            agree(job, made, "which step to load")
        made.close(gone)
        error = failure(agree(job, made, "the plan of step 1", others))
    assert f"rank {gone} has closed its Checkpointer of runs/gpt" in str(error)
    assert error.rank == gone


def test_a_rank_that_waits_with_another_path_is_named_with_both() -> None:
    job = Job(SIZE)
    with (
        mock.patch.object(exchange, "UNANSWERED_S", 0.3), opened(job, ranks=[0, 1]) as made,
        opened(job, "runs/other", ranks=[2]) as other,
    ):
        both = {0: made, 1: made, 2: other}
        each = job.run(lambda rank: both[rank.rank].sides[rank.rank].agree("which step to load", b"", everybody))
    assert "rank 2 waits for other ranks with a Checkpointer of runs/other, not of runs/gpt" in str(failure(each[:2]))
    assert "rank 0 waits for other ranks with a Checkpointer of runs/gpt, not of runs/other" in str(failure(each[2:]))


def warned(caplog: pytest.LogCaptureFixture, act: Callable[[], object], *words: str) -> None:
    """Within `act` it is told who is waited for, why it does not come, and what to do."""
    with caplog.at_level(logging.WARNING, "flowstone"):
        act()
    lines = [record.getMessage() for record in caplog.records]
    assert any(all(word in line for word in (*words, "alone=True")) for line in lines), lines


@pytest.mark.parametrize("met", [False, True])
def test_a_rank_that_lives_and_does_not_call_is_told_of_in_seconds(
    impatient: Clock, met: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(SIZE)
    with mock.patch.object(exchange, "NOTICE_S", 0.1), opened(job, deadline_s=0.5) as made:
        if met:
            agree(job, made, "which step to load")
            made.activity = dict.fromkeys(range(SIZE), Activity(1, "load"))
            impatient.passes(0.1)
        ends: list[AgreementResult | RankError] = []
        words = "rank 1 is alive, but has not made this call" + (", after load()" if met else "") + "; it is at "
        warned(caplog, lambda: ends.extend(agree(job, made, "the plan of step 1", [0, 2])), "waiting for rank 1", words)
    assert words in str(failure(ends))


def test_a_rank_that_has_constructed_none_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2)
    with mock.patch.object(exchange, "NOTICE_S", 0.1), opened(job, ranks=[0], deadline_s=0.4) as made:
        words = "rank 1 has constructed no Checkpointer of runs/gpt"
        warned(caplog, lambda: agree(job, made, "the plan of step 1", [0]), "waiting for rank 1", words)
    with opened(job, ranks=[0, 1], deadline_s=0.4) as made:
        agree(job, made, "which step to load", [0, 1])
        with opened(job, ranks=[0], deadline_s=0.4) as other:
            error = failure(agree(job, other, "which step to load", [0]))
    assert "rank 1 has constructed no other Checkpointer of runs/gpt; it is at " in str(error)


def test_who_is_held_up_does_not_wait_long_for_those_that_do_not_call(impatient: Clock) -> None:
    """And who has been found not to call is not waited for again, until it calls something."""
    job = Job(SIZE)
    with mock.patch.object(exchange, "UNANSWERED_S", 0.2), opened(job, deadline_s=600) as made:
        agree(job, made, "which step to load")
        with made.sides[0].short_wait():
            failure(agree(job, made, "the plan of step 1", [0, 2]))
        failure(agree(job, made, "the plan of step 2", [0, 2]))
        assert impatient.monotonic() < 2
        made.activity[1] = Activity(2, "save", step=3)
        impatient.passes(0.2)

        def last_after_a_second(entry: Agreement) -> AgreementResult:
            impatient.sleep(1.0 if entry.rank == 1 else 0)
            return made.sides[entry.rank].agree("the plan of step 3", b"", everybody)

        assert isinstance(job.run(last_after_a_second)[0], AgreementResult), "it has called, so it will come"
