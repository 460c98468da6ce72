"""The simulation detects faults in linked files and in compaction. See test_mutations.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_mutants import Mutant, is_found_out

from flowstone.commit import publish, removal
from flowstone.delta import baselines
from flowstone.delta.baselines import Baselines
from flowstone.save import conductor as saving
from flowstone.store.local_io import LocalWriteHandle

_RECORD = "    manifest = write_draft(store, draft, store_id, made)\n"
_RENAME = "    store.rename(draft.directory, step_directory(draft.step))\n"
_SYNC = "    sync_names(store)\n"
_LINK = "store.link(path_inside(step_directory(base.step), base.segments[number].name), path)"
_LINK_INTO_STEP = _LINK.replace("path)", "path_inside(step_directory(draft.step), row.name))")
_ROWS = "    rows = [_as_linked(base.segments[number], base.id) for number in needed]\n"
_COMPACTED = (  # files of the base whose chunks are all written again
    "    gone = [base.segments[number].name for number in range(len(base.segments)) if number not in needed]\n"
    "    home = step_directory(base.step)\n"
    "    remove = {name: lambda name=name: store.remove(path_inside(home, name)) for name in gone}\n"
)
_LATER = "store.__dict__.setdefault('later', {})"  # by file, what is put off until `_NOW`
_NOW = "[act() for act in store.__dict__.pop('later', {}).values()]"
_REMOVED_NOW = (_ROWS, _COMPACTED + "    [act() for act in remove.values()]\n" + _ROWS)
_REMOVED_LATER = (_ROWS, _COMPACTED + f"    {_LATER}.update(remove)\n" + _ROWS)
_UNNEEDED = "store.remove(path_inside(begun.draft.directory, name))"
_UNLINKED = (saving, "write", ((_UNNEEDED, f"{_LATER}.pop(name, None) or {_UNNEEDED}"),))

_REMOVED = "            store.remove(path_inside(directory, name))\n"
_REMOVED_ELSEWHERE = (
    "            for other in (one for one in store.names() if one.startswith('step-')):\n"
    "                for one in store.names(other):\n"
    "                    if one.startswith('from-') and one.endswith('-' + name):\n"
    "                        store.remove(path_inside(other, one))\n"
)


def _linked_later(link: str) -> tuple[str, str]:
    return _LINK, f"{_LATER}[row.name] = lambda number=number, row=row, path=path: {link}"


MUTANTS = {
    "a_base_loses_the_name_of_what_is_linked": Mutant(
        baselines, "refer",
        ((_LINK, f"{_LINK}; store.remove(path_inside(step_directory(base.step), base.segments[number].name))"),),
        "deltas",
    ),
    "links_are_made_once_their_directory_is_synced": Mutant(
        baselines, "refer", (_linked_later(_LINK),), "deltas", start=".saving-00000054",
        also=(_UNLINKED, (publish, "publish", ((_RECORD, f"{_RECORD}    {_NOW}\n"),))),
    ),
    "links_are_made_after_the_commit": Mutant(
        baselines, "refer", (_linked_later(_LINK_INTO_STEP),), "deltas", start="step-00000054",
        also=(_UNLINKED, (publish, "publish", ((_SYNC, f"{_SYNC}    {_NOW}\n"),))),
    ),
    "a_directory_with_links_is_not_synced": Mutant(
        publish, "write_draft", (("sync_names(store, draft.directory)", "pass"),), "deltas", start="from-",
    ),
    "retention_takes_what_a_newer_step_has_by_a_link": Mutant(
        removal, "empty_directory",
        ((_REMOVED, _REMOVED + _REMOVED_ELSEWHERE),),
        "deltas", start=".deleting-00000053",
    ),
    "a_compacted_file_is_removed_before_what_is_written_again": Mutant(
        baselines, "refer", (_REMOVED_NOW,), "deltas_compacted",
    ),
    "a_compacted_file_is_removed_before_the_manifest": Mutant(
        baselines, "refer", (_REMOVED_LATER,), "deltas_compacted", start="step-00000053",
        also=((publish, "publish", ((_RECORD, f"    {_NOW}\n{_RECORD}"),)),),
    ),
    "a_compacted_file_is_removed_before_the_commit_is_durable": Mutant(
        baselines, "refer", (_REMOVED_LATER,), "deltas_compacted", start="step-00000053",
        also=((publish, "publish", ((_RENAME, f"{_RENAME}    {_NOW}\n"),)),),
    ),
    "links_that_nothing_uses_stay": Mutant(
        Baselines, "stored_chunks", (("unneeded(plan, referred, rows)", "()"),), "deltas", start="step-00000054",
    ),
    "an_error_of_a_link_is_taken_for_a_refusal": Mutant(
        baselines, "refer", (("if code not in (None, errno.ENOENT, *_REFUSALS):", "if False:"),), "deltas", "error",
        start="from-", seeds=range(1),
    ),
    "ranks_remove_a_compacted_file_before_what_is_written_again": Mutant(
        baselines, "refer", (_REMOVED_NOW,), "team_deltas_compacted",
    ),
    "a_rank_publishes_a_failed_compaction": Mutant(
        LocalWriteHandle, "receipt", (("self._error() or ", ""),), "team_deltas_compacted", "error",
        start=".saving-00000053", seeds=range(1),
    ),
    "links_of_what_may_be_committed_are_removed": Mutant(
        saving, "commit", (("if not (isinstance(error, RankError) and error.undecided):", "if True:"),),
        "team_deltas_resumed", "freeze", start="index", seeds=range(1),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    mutant = MUTANTS[name]
    assert is_found_out(mutant, monkeypatch, scratch), f"no case of {mutant.scenario} notices that {name}"
