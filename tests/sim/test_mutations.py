"""The simulation can fail: each mutant leaves out or moves one step of the order of writes, and is detected.

A mutant is a change of text in one function. If the text does not exist any more, the mutant has to be updated; the
test must not pass without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_mutants import Mutant, is_found_out

from flowstone.adapters.dcp import publication
from flowstone.commit import catalog, publish, removal, retention
from flowstone.commit.writer import StoreWriter
from flowstone.coordination import save_coordinator
from flowstone.ranks import agreement, exchange
from flowstone.save import capturing
from flowstone.save import conductor as saving
from flowstone.save.saves import Saves
from flowstone.store.local import LocalStore
from flowstone.store.local_io import LocalWriteHandle
from flowstone.store.lock import WriterLock

_RENAME = "    store.rename(draft.directory, step_directory(draft.step))\n"
_RECORD = "    manifest = write_draft(store, draft, store_id, made)\n"
MUTANTS = {
    "segments_are_not_synced": Mutant(
        LocalWriteHandle, "receipt", ((" or self._segments.make_durable(self._ends())", ""),), "first_save",
        start="step-",
    ),
    "small_files_are_not_synced": Mutant(
        LocalStore, "put", (("self.system.sync(fd)", "pass"),), "first_save", start="step-"
    ),
    "draft_is_not_synced": Mutant(
        publish, "write_draft", (("sync_names(store, draft.directory)", "pass"),), "second_save", start="step-"
    ),
    "store_is_not_synced_after_the_rename": Mutant(
        publish, "publish", (("    sync_names(store)\n", ""),), "second_save", start="step-"
    ),
    "rename_comes_before_the_manifest": Mutant(
        publish, "publish",
        (
            (_RECORD, ""),
            (_RENAME, _RENAME + "    placed = msgspec.structs.replace(draft, directory=step_directory(draft.step))\n"
             + _RECORD.replace("store, draft", "store, placed")),
        ),
        "second_save", start="step-",
    ),
    "retention_comes_before_the_commit": Mutant(
        Saves, "_finish",
        # Behind the segments, which nobody would wait for any more if the power failed here.
        (("assignment = agree(", "pending.writing._job.wait(60.0); self._prune_all(); assignment = agree("),),
        "retention",
    ),
    "deletion_is_not_synced_before_files_go": Mutant(
        removal, "retire_step", (("sync_names(store)", "pass"),), "retention", start=".deleting-00000002"
    ),
    "deletion_begins_with_the_manifest": Mutant(
        removal, "retire_step",
        (("        store.rename(", "        store.remove(path_inside(name, MANIFEST_NAME))\n        store.rename("),),
        "retention", start="step-00000002",
    ),
    "sweep_does_not_sync_before_files_go": Mutant(
        catalog, "_sync_before", (("sync_names(store)", "pass"),), "retention", "kill", start=".deleting-00000002",
        seeds=range(12),
    ),
    "way_to_the_store_is_not_synced": Mutant(
        LocalStore, "make_directory", (("self._sync_ancestors()", "pass"),), "first_save", start="step-"
    ),
    "store_left_by_a_dead_process_is_trusted": Mutant(
        StoreWriter, "begin", (("if not store.exists(MARKER_NAME)", "if not store.exists()"),), "first_save", "kill",
    ),
    "rewind_is_not_synced": Mutant(catalog, "rewind", (("sync_names(store)", "pass"),), "rewind_alone"),
    "leftovers_are_not_swept": Mutant(
        StoreWriter, "begin",
        (("catalog.sweep_leftovers(store, self._on_removed, self._report_kept, run_later=later)", "pass"),),
        "sweep",
    ),
    "failed_lock_keeps_its_descriptor": Mutant(
        WriterLock, "_try_take", (("os.close(fd)  # an open", "pass  # an open"),), "second_save", "error"
    ),
    "failed_segment_is_published": Mutant(
        LocalWriteHandle, "receipt", (("self._error() or ", ""),), "second_save",
        "error", start="rank-",
    ),
    "segments_of_ranks_are_not_synced": Mutant(
        LocalWriteHandle, "receipt", ((" or self._segments.make_durable(self._ends())", ""),), "team_second_save",
        start="step-",
    ),
    "draft_of_ranks_is_not_synced": Mutant(
        publish, "write_draft", (("sync_names(store, draft.directory)", "pass"),), "team_second_save", start="step-"
    ),
    "ranks_are_told_before_the_rename_is_durable": Mutant(
        publish, "publish", (("    sync_names(store)\n", ""),), "team_second_save", start="step-"
    ),
    "failed_segment_of_a_rank_is_published": Mutant(
        LocalWriteHandle, "receipt", (("self._error() or ", ""),), "team_second_save",
        "error", start="rank-",
    ),
    "ranks_give_up_what_rank_0_is_deciding": Mutant(
        exchange.Exchange, "_tick_down",
        (("elif self._is_decided:\n        raise TooLateError(failure)\n    elif self.claim_decision():", "else:"),),
        "team_second_save", "freeze", start="index",
    ),
    "rank_0_decides_what_others_have_given_up": Mutant(
        agreement.Agreement, "_settle", (("if exchange.claim_decision():", "if True:"),), "team_second_save", "freeze",
        start="index",
    ),
    "others_remove_what_rank_0_publishes": Mutant(
        save_coordinator.SaveCoordinator, "commit", (
            ("if self.rank == 0:", "if True:"),
        ), "team_second_save", "freeze", start="index"
    ),
    "draft_that_others_removed_is_not_made_again": Mutant(
        capturing, "_capture_into", (("if error.errno != errno.ENOENT or tries <= 0:", "if True:"),),
        "team_second_save", "error", start="rank-", seeds=range(12),
    ),
    "a_try_writes_into_the_draft_of_another": Mutant(
        save_coordinator.SaveCoordinator, "begin_attempt", (("max(self._tries.get(step, 1), *heard, 1) + 1", "1"),),
        "team_two_tries", "freeze", start="index",
    ),
    "retention_counts_what_is_not_committed_yet": Mutant(
        retention.Retention, "run",
        (("existing, self._keep, committed=committed, foreign=self._foreign, awaited=awaited",
          "(*existing, committed + 1), self._keep"),),
        "team_overlapping", start="step-00000003",
    ),
    "dcp_segments_are_not_synced": Mutant(
        LocalWriteHandle, "receipt", ((" or self._segments.make_durable(self._ends())", ""),), "dcp_team_first_save",
        start="step-",
    ),
    "dcp_draft_is_not_synced": Mutant(
        publish, "write_draft", (("sync_names(store, draft.directory)", "pass"),), "dcp_second_save", start="step-"
    ),
    "dcp_is_told_before_the_rename_is_durable": Mutant(
        publication, "_publish", (("        store.sync_directory()\n", ""),), "dcp_first_save", start="step-"
    ),
    "dcp_removes_what_it_replaced_before_that_is_durable": Mutant(
        publication, "_publish", (("        store.sync_directory()\n", ""),), "dcp_team_overwrite", start="step-"
    ),
    "dcp_removes_what_it_is_to_replace": Mutant(
        publication, "_publish",
        ((
            "replaced = store",
            "store.exists(target.name) and removal.empty_directory(store, target.name)\n        replaced = store",
        ),),
        "dcp_overwrite", start="manifest",
    ),
    "dcp_names_a_checkpoint_before_its_manifest": Mutant(
        publication, "_publish",
        (
            ("        manifest = publish.write_draft(store, draft, owner, made)\n", ""),
            ("        store.sync_directory()\n", (
                "        draft = publish.Draft(target.step, draft.id, target.name)\n"
                "        manifest = publish.write_draft(store, draft, owner, made)\n        store.sync_directory()\n"
            )),
        ),
        "dcp_team_overwrite", start="step-",
    ),
    "dcp_keeps_what_a_dead_save_has_left": Mutant(
        publication, "begin", (("removal.empty_directory(store, target.draft_directory)", "pass"),),
        "dcp_first_save", "kill",
    ),
    "dcp_publishes_a_failed_segment": Mutant(
        LocalWriteHandle, "receipt", (("self._error() or ", ""),),
        "dcp_team_second_save", "error", start="rank-",
    ),
    "what_may_be_committed_is_removed": Mutant(
        saving, "commit", (("if not (isinstance(error, RankError) and error.undecided):", "if True:"),),
        "team_second_save", "freeze", start="index",
    ),
}


def _prune_all(self: Saves) -> None:
    verdicts = [retention.RetentionDecision(step, False, "a mutant") for step in catalog.steps(self._store)]
    if self._store_writer._keep is not None:
        retention.remove_expired(self._store, verdicts, self._emit.removed)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    monkeypatch.setattr(Saves, "_prune_all", _prune_all, raising=False)
    mutant = MUTANTS[name]
    assert is_found_out(mutant, monkeypatch, scratch), f"no case of {mutant.scenario} notices that {name}"
