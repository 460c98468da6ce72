"""Each goal uses the right rows, and passes or misses correctly."""

from __future__ import annotations

import made_up
import pytest
from made_up import GB, Measured, Outcome, load, save, two_rounds

from bench.goals import Goal, goals
from bench.rivals import entry


def by_text(all_goals: tuple[Goal, ...]) -> dict[str, Goal]:
    texts = {goal.text: goal for goal in all_goals}
    assert len(texts) == len(all_goals)
    return texts


def flowstone(name: str, saves: tuple[float, ...], loads: tuple[float, ...] = (), payload: int = 2 * GB) -> Measured:
    taken = tuple(save(number, seconds) for number, seconds in enumerate(saves, 1))
    loaded = tuple(load(seconds, number=number, how=entry(name).loads[0]) for number, seconds in enumerate(loads, 1))
    return Measured(name, 1, Outcome(payload, taken, loaded))


def reached(goal: Goal) -> float:
    assert goal.reached is not None
    return goal.reached.median


def test_goals_of_the_short_programme_tell_pass_from_miss() -> None:
    goals_by_text = by_text(goals(two_rounds()))
    first = goals_by_text["durable save, first save of a process, relative to fio's write rate"]
    assert (first.is_met, reached(first)) == (False, pytest.approx(0.5))
    cold = goals_by_text["cold load into existing tensors, fresh process, relative to fio's read rate"]
    assert cold.is_met
    assert str(cold) == f"pass  {cold.text}: 1.00, goal at least 0.95 (0.90 is tolerated)"
    faster = goals_by_text["durable save, later saves, rate relative to torch.save"]
    assert str(faster).startswith("miss")
    assert str(faster).endswith(": 4.0, goal at least 6.0")
    assert not any("TorchSnapshot" in text or "four ranks" in text for text in goals_by_text)


def test_a_row_that_failed_is_a_missed_goal() -> None:
    failed = Measured("torchsnapshot", 1, None, "cannot install: no network")
    goals_by_text = by_text(goals(made_up.run([flowstone("flowstone", (1.0,)), failed])))
    goal = goals_by_text["durable save, first save of a process, rate relative to TorchSnapshot take"]
    assert str(goal).startswith("miss")
    assert ": -, goal at least 4.5" in str(goal)


def test_processor_time_and_memory_must_stay_below() -> None:
    cheap = flowstone("flowstone-in-place", (1.0, 1.0), (1.0,))  # 0.1 s for a load of 2 GB
    goals_by_text = by_text(goals(made_up.run([cheap])))
    aligned = goals_by_text["CPU-seconds per GB, load into memory that is aligned like the file"]
    assert reached(aligned) == pytest.approx(0.05)
    bounded = Measured(
        "flowstone-arena-256", 1,
        Outcome(2 * GB, (save(1, 1.0, peak_bytes=300_000_000), save(2, 1.0, peak_bytes=400_000_000))),
    )
    goals_by_text = by_text(goals(made_up.run([bounded, flowstone("flowstone-arena", (1.0, 0.8))])))
    assert goals_by_text["CPU-seconds per GB, save through the arena, later saves"].is_met
    rate = goals_by_text["arena of 256 MiB, later saves, relative to the rate with an arena as large as the state"]
    assert (rate.is_met, reached(rate)) == (False, pytest.approx(0.8))
    peak = goals_by_text["arena of 256 MiB, extra peak memory in MB"]
    assert str(peak) == f"miss  {peak.text}: 350 (300-400), goal at most 336"


def test_small_tensors_are_compared_by_rate_not_by_time() -> None:
    bulk, small = (
        flowstone("flowstone", (2.0, 1.0), (1.0,)),
        flowstone("flowstone-small", (9.0, 0.2), (9.0, 0.1), payload=GB // 5),
    )
    named = by_text(goals(made_up.run([bulk, small])))
    assert reached(
        named["50,000 tensors of 4 KiB, later saves, relative to the rate with large tensors"]
    ) == pytest.approx(0.5)
    assert reached(
        named["50,000 tensors of 4 KiB, second cold load of a process, relative to the rate with large tensors"]
    ) == pytest.approx(1.0)


def test_a_job_of_ranks_and_refused_io_uring_have_their_own_measure() -> None:
    measured = [
        flowstone("flowstone", (1.0, 1.0), (1.0,)), flowstone("flowstone-ranks", (2.0, 2.2), (4.0,)),
        flowstone("flowstone-posix", (1.25, 1.0), (2.0,)),
    ]
    named = by_text(goals(made_up.run(measured, rounds=1, devices=made_up.devices((2.0,), jobs=4))))
    assert named["one job of four ranks, first save of a process, relative to four fio jobs"].is_met
    assert named["one job of four ranks, later saves, relative to four fio jobs"].is_met
    assert reached(named["one job of four ranks, cold load, relative to four fio jobs"]) == pytest.approx(0.5)
    assert reached(
        named["io_uring refused, first save of a process, relative to the rate with io_uring"]
    ) == pytest.approx(0.8)
    assert named["io_uring refused, later saves, relative to the rate with io_uring"].is_met
    assert reached(named["io_uring refused, cold load, relative to the rate with io_uring"]) == pytest.approx(0.5)


def test_sharing_reads_must_not_be_slower_and_reads_every_byte_once() -> None:
    all_goals = goals(made_up.replicas())
    assert [(goal.is_met, reached(goal)) for goal in all_goals] == [(True, 2.0), (True, 1.0)]
    assert all_goals[0].text.startswith("four replicas, cold: ")
    assert "device" in all_goals[-1].text


def test_dcp_through_flowstone_is_compared_with_dcp_itself() -> None:
    def blocked(name: str, seconds: float) -> Measured:
        return Measured(name, 1, Outcome(2 * GB, (save(1, 9.0, 8.0), save(2, 2.0, seconds))))

    goals_by_text = by_text(goals(made_up.run([
        flowstone("dcp-flowstone", (9.0, 1.0)), flowstone("dcp-1", (1.0, 4.0)), flowstone("dcp-2", (1.0, 2.0)),
        blocked("dcp-async", 1.0), blocked("dcp-flowstone-async", 0.05),
    ])))
    times = {threads: goals_by_text[f"dcp.save through Flowstone, later saves, rate relative to DCP, {threads}"]
             for threads in ("1 thread", "2 threads")}
    assert [(goal.is_met, reached(goal)) for goal in times.values()] == [(True, 4.0), (False, 2.0)]
    staged = goals_by_text["dcp.async_save through Flowstone, later saves, blocked time relative to DCP's own"]
    assert (staged.is_met, reached(staged)) == (True, pytest.approx(0.05))
