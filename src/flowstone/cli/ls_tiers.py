"""`flowstone ls` of several stores of one run: which step is where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from flowstone.arguments import memory_of
from flowstone.cli.output import DAMAGE, ERROR, errors_reported, local_time, print_json, print_rows, size_text, told
from flowstone.commit.entries import step_directory
from flowstone.commit.locations import check_store
from flowstone.commit.manifests import inside, read_manifest
from flowstone.config import EngineOptions
from flowstone.errors import FlowstoneError
from flowstone.format.manifest import Manifest
from flowstone.store.base import Store
from flowstone.tiers.policy import stores_of
from flowstone.tiers.restore import Seen, look_at

WHOLE, DAMAGED, ABSENT, ASIDE, ANOTHER, DOWN = "whole", "damaged", "-", "set aside", "another", "no answer"


def ls_tiers(paths: Sequence[Path], as_json: bool) -> None:
    """Report which stores have which step.

    Exit status 1 if one is damaged, 2 if a store does not answer, or is not there.
    """
    with errors_reported(as_json):
        stores = stores_of([str(path) for path in paths], EngineOptions())
        seen = look_at(stores)
        for one, answer in zip(stores, seen.held, strict=True):
            if answer is not None:
                check_store(one)
        rows = [_row(step, stores, seen) for step in sorted(_steps(seen))]
        tiers = [_tier(number, store, seen, rows) for number, store in enumerate(stores)]
        held = [None if (store := memory_of(path)) is None else store.status() for path in paths]
    if as_json:
        print_json({"tiers": tiers, "checkpoints": rows})
    else:
        titles = ("step", "created", "size", *(store.location for store in stores))
        print_rows(titles, [_cells(row) for row in rows])
        for tier, status in zip(tiers, held, strict=True):
            typer.echo(f"{tier['path']}: {_told(tier)}" + ("" if status is None else f"; {told(status)}"))
    if any(DAMAGED in _where(row) for row in rows):
        raise typer.Exit(DAMAGE)
    if not all(tier["answers"] and tier["exists"] for tier in tiers):
        raise typer.Exit(ERROR)


def _steps(seen: Seen) -> set[int]:
    return {step for held in seen.held if held is not None for step in held.steps}


def _row(step: int, stores: Sequence[Store], seen: Seen) -> dict[str, object]:
    """A step, and what each store has of it, nearest first. Sizes and dates are those of the nearest that is sound."""
    nearest: Manifest | None = None
    where = []
    for store, held, aside in zip(stores, seen.held, seen.aside, strict=True):
        found, manifest = _state(step, store, held is not None, held is not None and step in held.steps)
        if manifest is not None and step in aside:
            found = ASIDE
        elif manifest is not None and nearest is not None and manifest.id != nearest.id:
            found = ANOTHER
        elif manifest is not None:
            nearest = nearest or manifest
        where.append(found)
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
        sizes = [(store.size(inside(directory, name)), size) for name, size in files]
    except FlowstoneError:  # its manifest cannot be read, or a file is missing
        return DAMAGED, None
    return (WHOLE, manifest) if all(found == expected for found, expected in sizes) else (DAMAGED, None)


def _where(row: dict[str, object]) -> list[str]:
    where = row["where"]
    assert isinstance(where, list)
    return where


def _tier(number: int, store: Store, seen: Seen, rows: Sequence[dict[str, object]]) -> dict[str, object]:
    """What a store has. `missing`: steps above its newest that a nearer store has whole: what may still come."""
    own = [row["step"] for row in rows if _where(row)[number] == WHOLE]
    newest = own[-1] if own else None
    missing = [
        row["step"] for row in rows
        if (newest is None or int(str(row["step"])) > int(str(newest))) and WHOLE in _where(row)[:number]
    ]
    answers = seen.held[number] is not None
    return {
        "path": store.location, "answers": answers, "exists": answers and store.exists(), "newest": newest,
        "missing": missing,
    }


def _told(tier: dict[str, object]) -> str:
    if not tier["answers"]:
        return "does not answer"
    if not tier["exists"]:
        return "there is nothing; check the path"
    newest = "no step" if tier["newest"] is None else f"newest step {tier['newest']}"
    missing = tier["missing"]
    assert isinstance(missing, list)
    if not missing:
        return newest
    listed = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
    return f"{newest}; {len(missing)} newer in nearer stores only: {listed}"


def _cells(row: dict[str, object]) -> list[str]:
    created = "" if row["created"] is None else local_time(str(row["created"]))
    return [str(row["step"]), created, "" if row["bytes"] is None else size_text(row["bytes"]), *_where(row)]
