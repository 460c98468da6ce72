"""The simulation of journals can fail: each mutant is found out by the changes that an ordinary run plays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import test_journal_simulation
import test_journals_of_ranks_simulation
from sim_mutants import mutated

from flowstone.commit import journals
from flowstone.pipeline import journaling
from flowstone.store.appending import LocalAppending


@dataclass(frozen=True, slots=True)
class Mutant:
    """As in test_mutations.py. `scenario`: "" for that of two ranks; `last`: so many of its changes, at its end."""

    owner: object
    name: str
    changes: tuple[tuple[str, str], ...]
    scenario: str
    mode: str = "power"
    last: int = 25  # journals are under way by then


MUTANTS = {
    "frames_are_not_synced": Mutant(
        LocalAppending, "sync", (("self._system.sync_bytes(self._fd)", "pass"),), "goes_on"
    ),
    "journals_name_is_not_synced": Mutant(
        journaling, "_create", (("    sync(store)\n", ""),), "first"
    ),
    "journals_file_has_no_durable_name": Mutant(
        journaling, "_create", (("    sync(store, directory)\n", ""),), "first"
    ),
    "rewound_journals_are_not_synced": Mutant(
        journals, "cut", (("    sync(store)\n", ""),), "rewind", last=1000
    ),
    "of_frames_that_one_sync_is_for_the_last_alone_is_looked_at": Mutant(
        journals, "frames", (("journal.opening.torn_max", "1"),), "lags"
    ),
    "ranks_count_a_step_that_one_lacks": Mutant(
        journals, "common_steps", (("range(journal.opening.ranks)", "range(1)"),), ""
    ),
}


def _campaign(mutant: Mutant, scratch: Path) -> None:
    if not mutant.scenario:
        reference = test_journals_of_ranks_simulation.undisturbed()
        test_journals_of_ranks_simulation.campaign(mutant.mode, scratch, reference, every=5)
        return
    scenario = next(one for one in test_journal_simulation.SCENARIOS if one.name == mutant.scenario)
    assert scenario.every == 1, "its last changes are told by their numbers"
    reference = test_journal_simulation.undisturbed()
    test_journal_simulation.campaign(scenario, mutant.mode, scratch, reference, slice(-mutant.last, None))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_of_journals_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(mutant.owner, mutant.name, mutated(mutant.owner, mutant.name, mutant.changes))
    with pytest.raises(AssertionError, match="at change"):
        _campaign(mutant, scratch)
