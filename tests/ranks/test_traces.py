"""Spans of a job of several ranks: each has its own, under its rank."""

from __future__ import annotations

import json
from pathlib import Path

from processes import run


def test_each_rank_has_spans_of_its_own_part(tmp_path: Path) -> None:
    for rank, (first, second, load) in enumerate(run(2, "trace_acts", "traced", str(tmp_path))):
        assert [item[0] for item in (first, second, load)] == [[rank]] * 3
        assert [item[1] for item in (first, second, load)] == [[1], [2], [2]]
        both = {"waited", "described", "planned", "begun", "encoded", "early", "blocked", "captured", "capture"}
        both |= {"written", "write", "synced", "agreed", "published", "save"}
        assert set(second[2]) == both
        assert set(first[2]) == both | {"copied"}  # the ranks had no plan yet, and the caller did not wait for one
        assert set(load[2]) >= {"wanted", "planned", "read", "deliver", "finished", "agreed", "load"}
        for step in (1, 2):
            events = json.loads((tmp_path / f"{step}-{rank}.json").read_text())["traceEvents"]
            assert {event["pid"] for event in events} == {rank}
