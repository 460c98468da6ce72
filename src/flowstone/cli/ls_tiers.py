"""`flowstone ls` for several stores of one run: shows which store has which step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from flowstone.cli.output import (
    DAMAGE,
    ERROR,
    errors_reported,
    local_time,
    print_json,
    print_rows,
    run_status_text,
    size_text,
)
from flowstone.commit.entries import step_directory
from flowstone.commit.locations import check_store
from flowstone.commit.manifests import path_inside, read_manifest
from flowstone.config import EngineOptions
from flowstone.errors import FlowstoneError
from flowstone.format.manifest import Manifest
from flowstone.store.base import Store
from flowstone.stores.arguments import memory_of
from flowstone.tiered.policy import stores_of
from flowstone.tiered.restore import TierSurvey, survey_tiers

WHOLE, DAMAGED, ABSENT, ASIDE, ANOTHER, DOWN = "whole", "damaged", "-", "set aside", "another", "no answer"


def ls_tiers(paths: Sequence[Path], as_json: bool) -> None:
    """Show which stores have which step.

    Exit status 1 if a checkpoint is damaged, 2 if a store does not answer, or does not exist.
    """
    with errors_reported(as_json):
        stores = stores_of([str(path) for path in paths], EngineOptions())
        seen = survey_tiers(stores)
        for store, answer in zip(stores, seen.contents, strict=True):
            if answer is not None:
                check_store(store)
        rows = [_row(step, stores, seen) for step in sorted(_steps(seen))]
        tiers = [_tier(number, store, seen, rows) for number, store in enumerate(stores)]
        statuses = [None if (memory := memory_of(path)) is None else memory.status() for path in paths]
    if as_json:
        print_json({"tiers": tiers, "checkpoints": rows})
    else:
        titles = ("step", "created", "size", *(store.location for store in stores))
        print_rows(titles, [_cells(row) for row in rows])
        for tier, status in zip(tiers, statuses, strict=True):
            typer.echo(
                f"{tier['path']}: {_tier_text(tier)}" + ("" if status is None else f"; {run_status_text(status)}")
            )
    if any(DAMAGED in _where(row) for row in rows):
        raise typer.Exit(DAMAGE)
    if not all(tier["answers"] and tier["exists"] for tier in tiers):
        raise typer.Exit(ERROR)


def _steps(seen: TierSurvey) -> set[int]:
    return {step for answer in seen.contents if answer is not None for step in answer.steps}


def _row(step: int, stores: Sequence[Store], seen: TierSurvey) -> dict[str, object]:
    """The row of a step: its state in each store, nearest first. Size and date are from the nearest store that has it
    undamaged.
    """
    nearest: Manifest | None = None
    where = []
    for store, answer, aside in zip(stores, seen.contents, seen.aside, strict=True):
        state, manifest = _state(step, store, answer is not None, answer is not None and step in answer.steps)
        if manifest is not None and step in aside:
            state = ASIDE
        elif manifest is not None and nearest is not None and manifest.id != nearest.id:
            state = ANOTHER
        elif manifest is not None:
            nearest = nearest or manifest
        where.append(state)
    size = 0 if nearest is None else sum(row.bytes for row in nearest.segments) + nearest.index.bytes
    return {
        "step": step, "created": None if nearest is None else nearest.created,
        "bytes": None if nearest is None else size + nearest.objects.bytes, "where": where,
    }


def _state(step: int, store: Store, answers: bool, is_there: bool) -> tuple[str, Manifest | None]:
    if not answers:
        return DOWN, None
    if not is_there:
        return ABSENT, None
    directory = step_directory(step)
    try:
        manifest = read_manifest(store, directory)
        files = [(row.name, row.bytes) for row in manifest.segments]
        files += [(row.name, row.bytes) for row in (manifest.index, manifest.objects)]
        sizes = [(store.size(path_inside(directory, name)), size) for name, size in files]
    except FlowstoneError:  # its manifest cannot be read, or one of its files is missing
        return DAMAGED, None
    return (WHOLE, manifest) if all(actual == expected for actual, expected in sizes) else (DAMAGED, None)


def _where(row: dict[str, object]) -> list[str]:
    where = row["where"]
    assert isinstance(where, list)
    return where


def _tier(number: int, store: Store, seen: TierSurvey, rows: Sequence[dict[str, object]]) -> dict[str, object]:
    """The summary of a store. Its field `missing` lists steps that are newer than its newest undamaged step, and
    undamaged in a nearer store, so they may still be copied.
    """
    own = [row["step"] for row in rows if _where(row)[number] == WHOLE]
    newest = own[-1] if own else None
    missing = [
        row["step"] for row in rows
        if (newest is None or int(str(row["step"])) > int(str(newest))) and WHOLE in _where(row)[:number]
    ]
    answers = seen.contents[number] is not None
    return {
        "path": store.location, "answers": answers, "exists": answers and store.exists(), "newest": newest,
        "missing": missing,
    }


def _tier_text(tier: dict[str, object]) -> str:
    if not tier["answers"]:
        return "does not answer"
    if not tier["exists"]:
        return "does not exist; check the path"
    newest = "no step" if tier["newest"] is None else f"newest step {tier['newest']}"
    missing = tier["missing"]
    assert isinstance(missing, list)
    if not missing:
        return newest
    listed = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
    return f"{newest}; {len(missing)} newer step(s) in nearer stores only: {listed}"


def _cells(row: dict[str, object]) -> list[str]:
    created = "" if row["created"] is None else local_time(str(row["created"]))
    return [str(row["step"]), created, "" if row["bytes"] is None else size_text(row["bytes"]), *_where(row)]
