"""Each goal is about the right rows, and pass differs from miss."""

from __future__ import annotations

import made_up
import pytest
from made_up import GB, Measured, Outcome, load, save, two_rounds

from bench.goals import Goal, goals
from bench.rivals import entry


def by_text(found: tuple[Goal, ...]) -> dict[str, Goal]:
    texts = {goal.text: goal for goal in found}
    assert len(texts) == len(found)
    return texts


def flowstone(name: str, saves: tuple[float, ...], loads: tuple[float, ...] = (), payload: int = 2 * GB) -> Measured:
    taken = tuple(save(number, seconds) for number, seconds in enumerate(saves, 1))
    loaded = tuple(load(seconds, number=number, how=entry(name).loads[0]) for number, seconds in enumerate(loads, 1))
    return Measured(name, 1, Outcome(payload, taken, loaded))


def reached(goal: Goal) -> float:
    assert goal.reached is not None
    return goal.reached.median


def test_goals_of_the_short_programme_tell_pass_from_miss() -> None:
    found = by_text(goals(two_rounds()))
    first = found["durable save, first save of a process, of fio's write rate"]
    assert (first.is_met, reached(first)) == (False, pytest.approx(0.5))
    cold = found["cold load into existing tensors, fresh process, of fio's read rate"]
    assert cold.is_met
    assert str(cold) == f"pass  {cold.text}: 1.00, goal at least 0.95 (floor 0.90)"
    faster = found["durable save, later saves, times the rate of torch.save"]
    assert str(faster).startswith("miss")
    assert str(faster).endswith(": 4.0, goal at least 6.0")
    assert not any("TorchSnapshot" in text or "four ranks" in text for text in found)


def test_a_row_that_failed_is_a_missed_goal() -> None:
    failed = Measured("torchsnapshot", 1, None, "cannot install: no network")
    found = by_text(goals(made_up.run([flowstone("flowstone", (1.0,)), failed])))
    goal = found["durable save, first save of a process, times the rate of TorchSnapshot take"]
    assert str(goal).startswith("miss")
    assert ": -, goal at least 4.5" in str(goal)


def test_processor_time_and_memory_must_stay_below() -> None:
    cheap = flowstone("flowstone-in-place", (1.0, 1.0), (1.0,))  # 0.1 s for a load of 2 GB
    found = by_text(goals(made_up.run([cheap])))
    assert reached(found["CPU-seconds per GB, load in phase"]) == pytest.approx(0.05)
    bounded = Measured(
        "flowstone-arena-256", 1,
        Outcome(2 * GB, (save(1, 1.0, peak_bytes=300_000_000), save(2, 1.0, peak_bytes=400_000_000))),
    )
    found = by_text(goals(made_up.run([bounded, flowstone("flowstone-arena", (1.0, 0.8))])))
    assert found["CPU-seconds per GB, save through the arena, later saves"].is_met
    rate = found["arena of 256 MiB, later saves, of the rate with an arena as large as the state"]
    assert (rate.is_met, reached(rate)) == (False, pytest.approx(0.8))
    peak = found["arena of 256 MiB, extra peak memory in MB"]
    assert str(peak) == f"miss  {peak.text}: 350 (300-400), goal at most 336"


def test_small_tensors_are_compared_by_rate_not_by_time() -> None:
    bulk, small = (
        flowstone("flowstone", (2.0, 1.0), (1.0,)),
        flowstone("flowstone-small", (9.0, 0.2), (9.0, 0.1), payload=GB // 5),
    )
    found = by_text(goals(made_up.run([bulk, small])))
    assert reached(found["50,000 tensors of 4 KiB, later saves (plan cached), of the bulk rate"]) == pytest.approx(0.5)
    assert reached(
        found["50,000 tensors of 4 KiB, second cold load of a process, of the bulk rate"]
    ) == pytest.approx(1.0)


def test_a_job_of_ranks_and_refused_io_uring_have_their_own_measure() -> None:
    measured = [
        flowstone("flowstone", (1.0, 1.0), (1.0,)), flowstone("flowstone-ranks", (2.0, 2.2), (4.0,)),
        flowstone("flowstone-posix", (1.25, 1.0), (2.0,)),
    ]
    found = by_text(goals(made_up.run(measured, rounds=1, devices=made_up.devices((2.0,), jobs=4))))
    assert found["one job of four ranks, first save of a process, of four fio jobs"].is_met
    assert found["one job of four ranks, later saves, of four fio jobs"].is_met
    assert reached(found["one job of four ranks, cold load, of four fio jobs"]) == pytest.approx(0.5)
    assert reached(found["io_uring refused, first save of a process, of the rate with io_uring"]) == pytest.approx(0.8)
    assert found["io_uring refused, later saves, of the rate with io_uring"].is_met
    assert reached(found["io_uring refused, cold load, of the rate with io_uring"]) == pytest.approx(0.5)


def test_sharing_reads_must_not_be_slower_and_reads_every_byte_once() -> None:
    found = goals(made_up.replicas())
    assert [(goal.is_met, reached(goal)) for goal in found] == [(True, 2.0), (True, 1.0)]
    assert found[0].text.startswith("four replicas, cold: ")
    assert "device" in found[-1].text


def test_dcp_through_flowstone_is_compared_with_dcp_itself() -> None:
    def blocked(name: str, seconds: float) -> Measured:
        return Measured(name, 1, Outcome(2 * GB, (save(1, 9.0, 8.0), save(2, 2.0, seconds))))

    found = by_text(goals(made_up.run([
        flowstone("dcp-flowstone", (9.0, 1.0)), flowstone("dcp-1", (1.0, 4.0)), flowstone("dcp-2", (1.0, 2.0)),
        blocked("dcp-async", 1.0), blocked("dcp-flowstone-async", 0.05),
    ])))
    times = {threads: found[f"dcp.save through Flowstone, later saves, times the rate of DCP, {threads}"]
             for threads in ("1 thread", "2 threads")}
    assert [(goal.is_met, reached(goal)) for goal in times.values()] == [(True, 4.0), (False, 2.0)]
    staged = found["dcp.async_save through Flowstone, later saves, blocked, of what DCP async blocks"]
    assert (staged.is_met, reached(staged)) == (True, pytest.approx(0.05))
