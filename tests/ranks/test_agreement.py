"""Agreements: all ranks get the same result, whatever happens to any of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from threads import Clock, Job

from flowstone.errors import FullError, RankError
from flowstone.ranks import Agreement, Decision, KeyValueStore, Timeouts
from flowstone.ranks.agreement import AgreementResult
from flowstone.ranks.heartbeat import Heartbeat

MIB = 1 << 20


def joined(messages: Sequence[bytes]) -> Decision:
    return Decision(b",".join(messages), [b"for " + message for message in messages])


def name(rank: Agreement) -> bytes:
    return f"{rank.rank}".encode()


@pytest.mark.parametrize(("size", "fan"), [(1, 2), (2, 2), (3, 1), (5, 2), (13, 3), (40, 16)])
def test_everybody_learns_what_rank_0_decides_and_its_own(size: int, fan: int) -> None:
    job = Job(size, fan=fan)
    everything = b",".join(f"{rank}".encode() for rank in range(size))
    for _ in range(3):
        results = job.run(lambda rank: rank.agree("roll call", name(rank), joined))
        assert results == [AgreementResult(everything, f"for {rank}".encode()) for rank in range(size)]


def test_a_job_of_one_rank_needs_no_board() -> None:
    assert Agreement(None, 0, 1).agree("alone", b"me", joined) == AgreementResult(b"me", b"for me")
    with pytest.raises(FullError):
        Agreement(None, 0, 1).agree("alone", FullError("no space"), joined)


def test_messages_may_be_longer_than_a_value_of_the_store() -> None:
    job = Job(4, fan=1)
    long = [bytes([rank]) * (2 * MIB + rank) for rank in range(4)]
    results = job.run(lambda rank: rank.agree("long", long[rank.rank], lambda message: Decision(b"".join(message))))
    assert {result.common for result in results} == {b"".join(long)}


def test_nothing_is_left_on_the_board_but_the_last_verdict() -> None:
    job = Job(7, fan=2)
    counts = []
    for _ in range(5):
        job.run(lambda rank: rank.agree("again", b"x" * (MIB + 1), joined))
        counts.append(job.server.num_keys())
    assert counts[0] == counts[-1]
    assert counts[0] <= 2 * 7 + 10 + 7  # for each rank its own message, in two parts; the common one, in eight


@pytest.mark.parametrize("failing", [0, 1, 6])
def test_a_failure_reaches_every_rank_as_the_same_error(failing: int) -> None:
    job = Job(7, fan=2)

    def act(rank: Agreement) -> AgreementResult:
        error = FullError("no space to write segment 3", errno=28, needed="5 bytes", next="free some")
        return rank.agree("commit", error if rank.rank == failing else b"fine", joined)

    errors = job.run(act)
    assert isinstance(errors.pop(failing), FullError), "where it happened it is what it was"
    assert all(isinstance(error, RankError) for error in errors)
    assert {str(error) for error in errors} == {str(errors[0])}
    error = errors[0]
    assert (error.rank, error.phase, error.errno, error.kind) == (failing, "commit", 28, "FullError")
    assert f"rank {failing} failed: no space to write segment 3" in str(error)
    assert "free some" in str(error)
    assert job.run(lambda rank: rank.agree("next", b"", joined))[0] == AgreementResult(b"," * 6, b"for ")


def test_of_several_failures_everybody_learns_the_same_one() -> None:
    job = Job(7, fan=2)
    errors = job.run(lambda rank: rank.agree("commit", OSError(rank.rank, "bad") if rank.rank > 2 else b"", joined))
    assert isinstance(errors.pop(3), OSError)
    assert {error.rank for error in errors} == {3}


def test_what_rank_0_cannot_decide_everybody_learns() -> None:
    def refuse(messages: Sequence[bytes]) -> Decision:
        raise ValueError("two of them differ")

    errors = Job(3).run(lambda rank: rank.agree("plan", b"", refuse))
    assert isinstance(errors[0], ValueError)
    assert {str(error) for error in errors[1:]} == {str(errors[1])}
    assert "rank 0 failed: ValueError: two of them differ" in str(errors[1])


@pytest.mark.parametrize("absent", [1, 4, 6])
def test_a_rank_that_never_comes_is_named_by_all_and_may_come_later(impatient: Clock, absent: int) -> None:
    job = Job(7, fan=2, deadline_s=0.3)
    others = [rank for rank in range(7) if rank != absent]
    errors = job.run(lambda rank: rank.agree("save 12", b"", joined), ranks=others)
    assert 0.3 <= impatient.monotonic() < 1.2, "the deadline, and a fifth of a second for each level of the tree"
    assert {str(error) for error in errors} == {str(errors[0])}
    assert errors[0].rank == absent
    assert f"rank {absent} did not reach 'save 12'" in str(errors[0])
    late = job.run(lambda rank: rank.agree("save 12", b"", joined), ranks=[absent])
    assert str(late[0]) == str(errors[0])
    assert all(isinstance(value, AgreementResult) for value in job.run(lambda rank: rank.agree("save 13", b"", joined)))


@pytest.mark.usefixtures("impatient")
def test_without_rank_0_the_others_say_so() -> None:
    job = Job(4, fan=2, deadline_s=0.2)
    errors = job.run(lambda rank: rank.agree("save", b"", joined), ranks=[1, 2, 3])
    assert {error.rank for error in errors} == {0}
    assert all("rank 0 did not decide on 'save'" in str(error) for error in errors)


@pytest.mark.usefixtures("impatient")
def test_a_rank_0_that_comes_after_the_others_have_given_up_decides_nothing() -> None:
    job = Job(4, fan=2, deadline_s=0.2)
    given_up = job.run(lambda rank: rank.agree("save", b"", joined), ranks=[1, 2, 3])
    decided: list[object] = []
    late = job.run(lambda rank: rank.agree("save", b"", lambda output: decided.append(output) or Decision()), ranks=[0])
    assert {str(error) for error in (*given_up, *late)} == {str(late[0])}
    assert not decided
    assert all(isinstance(value, AgreementResult) for value in job.run(lambda rank: rank.agree("save", b"", joined)))


def test_while_rank_0_decides_nobody_gives_up_on_it(impatient: Clock) -> None:
    job = Job(3, deadline_s=0.6)

    def slowly(messages: Sequence[bytes]) -> Decision:
        impatient.sleep(1.3)  # longer than anybody would wait for it to begin
        return joined(messages)

    assert {value.common for value in job.run(lambda rank: rank.agree("save", b"x", slowly))} == {b"x,x,x"}


def test_a_silent_rank_is_known_long_before_the_deadline(impatient: Clock) -> None:
    job = Job(3, deadline_s=600, silence_s=0.5)
    heartbeats = [Heartbeat(kv_store, rank, every_s=0.05) for rank, kv_store in enumerate(job.kv_stores)]
    impatient.passes(0.2)
    heartbeats.pop().stop()  # rank 2 is killed
    errors = job.run(lambda rank: rank.agree("save", b"", joined), ranks=[0, 1])
    assert 0.7 <= impatient.monotonic() < 2
    assert {error.rank for error in errors} == {2}
    assert "nothing heard from rank 2" in str(errors[0])
    for heartbeat in heartbeats:
        heartbeat.stop()


def test_a_slow_rank_that_is_alive_is_waited_for(impatient: Clock, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(3, deadline_s=600, silence_s=0.3, reminder_s=0.2)
    heartbeats = [Heartbeat(kv_store, rank, every_s=0.02) for rank, kv_store in enumerate(job.kv_stores)]

    def act(rank: Agreement) -> AgreementResult:
        impatient.sleep(1.0 if rank.rank == 2 else 0)
        return rank.agree("save 7", b"", joined)

    with caplog.at_level(logging.WARNING, "flowstone"):
        assert all(isinstance(item, AgreementResult) for item in job.run(act))
    for heartbeat in heartbeats:
        heartbeat.stop()
    assert any("rank 0, save 7: waiting for rank 2 (" in record.getMessage() for record in caplog.records)
    assert any("rank 1, save 7: waiting for rank 0 to decide" in record.getMessage() for record in caplog.records)


def test_without_the_store_a_rank_is_told_that_it_is_gone() -> None:
    class Gone:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("Connection reset by peer\nand a page of addresses")

    with pytest.raises(RankError, match="can no longer reach the job's key-value store, in 'save'") as caught:
        Agreement(Gone(), 1, 2).agree("save", b"", joined)  # type: ignore[arg-type]
    assert "Connection reset by peer" in str(caught.value)
    assert "addresses" not in str(caught.value)
    assert caught.value.undecided


class _Watched:
    """A board on which one rank looks for a key at moments that a test chooses."""

    def __init__(self, kv_store: KeyValueStore, look: Callable[[list[str], bool], bool]) -> None:
        self._kv_store, self._look = kv_store, look

    def check(self, keys: list[str]) -> bool:
        return self._look(keys, self._kv_store.check(keys))

    def __getattr__(self, name: str) -> object:
        return getattr(self._kv_store, name)


def test_what_a_rank_reads_of_its_children_is_not_taken_down_by_them(impatient: Clock) -> None:
    """Of 19 ranks the last is late. Rank 17 has learnt so, and has gone, just as its parent begins to read it."""
    job = Job(19, deadline_s=0.3)
    looked, gone = threading.Event(), threading.Event()
    decided: list[bool] = []

    def parent_looks(keys: list[str], looks: bool) -> bool:
        if keys == ["1/down"] and looks:
            decided.append(looks)
        if decided and keys == ["1/up/17"] and not looked.is_set():
            assert looks
            looked.set()
            while not gone.is_set():
                impatient.sleep(0.01)
        return looks

    def child_looks(keys: list[str], looks: bool) -> bool:
        return looks and (keys != ["1/down"] or looked.is_set())

    for rank, look in ((1, parent_looks), (17, child_looks)):
        kv_store = cast("KeyValueStore", _Watched(job.kv_stores[rank], look))
        job.ranks[rank] = Agreement(kv_store, rank, 19, timeouts=Timeouts(0.3 if rank == 17 else 600))

    def act(rank: Agreement) -> AgreementResult:
        try:
            return rank.agree("save", b"", joined)
        finally:
            if rank.rank == 17:
                gone.set()

    errors = job.run(act, ranks=list(range(18)))
    assert looked.is_set()
    assert impatient.monotonic() < 20, "a board waits for what is gone"
    assert {str(error) for error in errors} == {str(errors[0])}
    late = job.run(lambda rank: rank.agree("save", b"", joined), ranks=[18])
    assert str(late[0]) == str(errors[0])
    job.run(lambda rank: rank.agree("next", b"", joined))
    job.run(lambda rank: rank.agree("next", b"", lambda _: Decision()))
    assert job.server.num_keys() <= 5, "the last verdict and its claim, and nothing of those who were too late"


def test_ranks_that_agree_on_different_things_are_told() -> None:
    errors = Job(3).run(lambda rank: rank.agree("load" if rank.rank == 2 else "save", b"", joined))
    assert all("rank 2 is in 'load' while rank 0 is in 'save'" in str(error) for error in errors)


def test_a_rank_reads_few_messages_however_many_ranks_there_are() -> None:
    job = Job(40, fan=4)
    job.run(lambda rank: rank.agree("count", b"", lambda message: Decision(b"")))
    sent = [rank.mailbox.sent for rank in job.ranks if rank.mailbox is not None]
    assert max(sent) <= 3
