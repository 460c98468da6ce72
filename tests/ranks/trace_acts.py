"""Functions that ranks run in tests of traces."""

from __future__ import annotations

from acts import fill, opened, state_of

from flowstone.trace import Trace


def traced(rank: int, path: str) -> list[list[object]]:
    """A save whose plan is new, one whose plan is known, and a load: the phases of each, and the ranks they name."""
    state = state_of("rows")
    rows: list[list[object]] = []
    with opened(f"{path}/run") as checkpointer:
        for step in (1, 2):
            checkpointer.fence()
            fill(state, step)
            with Trace(f"{path}/{step}-{rank}.json") as trace:
                checkpointer.save(step, state)
                checkpointer.wait()
            rows.append(_told(trace))
        with Trace() as trace:
            checkpointer.load(state)
        rows.append(_told(trace))
    return rows


def _told(trace: Trace) -> list[object]:
    return [sorted({span.rank for span in trace.spans}), sorted({span.step for span in trace.spans}),
            sorted({span.phase for span in trace.spans})]
