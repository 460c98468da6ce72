"""The simulation of journals can fail: the changes of an ordinary run detect each mutant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import test_journal_simulation
import test_journals_of_ranks_simulation
from sim_mutants import mutated

from flowstone.journal import journaling, journals
from flowstone.store.local_append import LocalAppendFile


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
        LocalAppendFile, "sync", (("self._system.sync_bytes(self._fd)", "pass"),), "goes_on"
    ),
    "journals_name_is_not_synced": Mutant(
        journaling, "_create", (("    sync_names(store)\n", ""),), "first"
    ),
    "journals_file_has_no_durable_name": Mutant(
        journaling, "_create", (("    sync_names(store, directory)\n", ""),), "first"
    ),
    "rewound_journals_are_not_synced": Mutant(
        journals, "cut_journals", (("    sync_names(store)\n", ""),), "rewind", last=1000
    ),
    "of_frames_that_one_sync_is_for_the_last_alone_is_looked_at": Mutant(
        journals, "complete_frames", (("journal.header.torn_max", "1"),), "lags"
    ),
    "ranks_count_a_step_that_one_lacks": Mutant(
        journals, "common_steps", (("range(journal.header.ranks)", "range(1)"),), ""
    ),
}


def _campaign(mutant: Mutant, scratch: Path) -> None:
    if not mutant.scenario:
        reference = test_journals_of_ranks_simulation.undisturbed()
        test_journals_of_ranks_simulation.campaign(mutant.mode, scratch, reference, every=5)
        return
    scenario = next(scenario for scenario in test_journal_simulation.SCENARIOS if scenario.name == mutant.scenario)
    assert scenario.every == 1, "its last changes are told by their numbers"
    reference = test_journal_simulation.undisturbed()
    test_journal_simulation.campaign(scenario, mutant.mode, scratch, reference, slice(-mutant.last, None))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_of_journals_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(mutant.owner, mutant.name, mutated(mutant.owner, mutant.name, mutant.changes))
    with pytest.raises(AssertionError, match="at change"):
        _campaign(mutant, scratch)
