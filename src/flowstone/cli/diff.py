"""`flowstone diff`: what two checkpoints of any known formats have that is not equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowstone.cli.output import (
    DAMAGE,
    AsJson,
    Budget,
    Skips,
    errors_reported,
    print_json,
    print_rows,
    size_text,
)
from flowstone.cli.rules import Inverse, RulesOption, conversion_rules
from flowstone.errors import printable
from flowstone.runtime.progress import terminal_progress

if TYPE_CHECKING:
    from flowstone.convert.diff import DiffReport, TensorDiff

_LISTED_MAX = 100  # of each kind; JSON has all


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A store, or one checkpoint, of any known format.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    step_a: Annotated[int | None, typer.Option("--step-a", help="Of A, a store; default: the newest.")] = None,
    step_b: Annotated[int | None, typer.Option("--step-b", help="Of B, a store; default: the newest.")] = None,
    section: Annotated[
        str | None, typer.Option("--section", help="Compare only this section; '' for all, by full name. Default: all.")
    ] = None,
    names: Annotated[
        list[str] | None, typer.Option("--names", metavar="PATTERN", help="Compare what matches; repeat. Default: all.")
    ] = None,
    skip: Skips = None,
    rules: RulesOption = None,
    inverse: Inverse = False,
    rtol: Annotated[float, typer.Option("--rtol", help="Equal: |a - b| <= atol + rtol * |b|.")] = 0.0,
    atol: Annotated[float, typer.Option("--atol", help="See --rtol.")] = 0.0,
    ignore_dtype: Annotated[bool, typer.Option("--ignore-dtype", help="Two types may be equal.")] = False,
    trust_digests: Annotated[
        bool, typer.Option("--trust-digests", help="Tensors of Flowstone with equal digests are equal, and not read.")
    ] = False,
    digests_only: Annotated[
        bool, typer.Option("--digests-only", help="Of two of Flowstone: count chunks that differ, read none.")
    ] = False,
    budget_bytes: Budget = "512MiB",  # type: ignore[assignment]
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints by name and value. Exit status 0: equal, 1: different or damaged, 2: an error."""
    from flowstone.convert.diff import diff as run

    with errors_reported(as_json):
        found = conversion_rules(rules, None, inverse=inverse, configured=((b, step_b), (a, step_a)))
        with terminal_progress("comparing") as show:
            report = run(
                a, b, step_a=step_a, step_b=step_b, section=section, names=names or "*", skip=skip or (), rules=found,
                rtol=rtol, atol=atol, ignore_dtype=ignore_dtype, trust_digests=trust_digests,
                digests_only=digests_only, budget_bytes=budget_bytes, on_progress=show,
            )
    if as_json:
        print_json({"equal": report.equal, **asdict(report), "tensors": [_json(one) for one in report.tensors]})
    else:
        _print(report)
    if not report.equal:
        raise typer.Exit(DAMAGE)


def _json(one: TensorDiff) -> dict[str, object]:
    """As it is, but an infinite difference is text: JSON has no such number."""
    return {key: str(value) if value == math.inf else value for key, value in asdict(one).items()}


def _print(report: DiffReport) -> None:
    for place, names in ((report.a, report.only_in_a), (report.b, report.only_in_b)):
        _print_list(f"only in {place}", names)
    _print_list("stored once in the other, under another name", report.tied_names)
    _print_list("values that differ", [
        f"{one.name}: {one.values[0] or 'missing'} against {one.values[1] or 'missing'}" for one in report.values
    ])
    rows = [_row(one) for one in report.differing]
    if rows:
        titles = ("tensor", "type", "shape", "unequal", "largest", "relative", "at", "NaNs")
        print_rows(titles, rows[:_LISTED_MAX])
    if len(rows) > _LISTED_MAX:
        typer.echo(f"... and {len(rows) - _LISTED_MAX} more: --json lists all")
    count = len(report.tensors)
    if report.equal:
        said = f"equal: {count} tensors"
    else:
        said = f"different: {count - len(rows)} of {count} tensors that both have are equal"
    by_digest = sum(one.by_digest for one in report.tensors)
    said += f" ({by_digest} by their digests)" if by_digest else ""
    typer.echo(f"{said}; {size_text(report.bytes)} compared, {report.seconds:.1f} s")


def _print_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        typer.echo(printable(f"{title}: {len(lines)}"))
        more = [f"... and {len(lines) - _LISTED_MAX} more"] if len(lines) > _LISTED_MAX else []
        for line in (*lines[:_LISTED_MAX], *more):
            typer.echo(printable(f"  {line}"))


def _row(one: TensorDiff) -> list[str]:
    def pair(texts: tuple[object, object]) -> str:
        return str(texts[0]) if texts[0] == texts[1] else f"{texts[0]} / {texts[1]}"

    shapes = pair((_sides(one.shapes[0]), _sides(one.shapes[1])))
    if one.chunks is not None:
        return [one.name, pair(one.dtypes), shapes, f"{one.chunks[0]} of {one.chunks[1]} chunks", "", "", "", ""]
    if one.unequal is None:
        return [one.name, pair(one.dtypes), shapes, "not compared", "", "", "", ""]
    return [
        one.name, pair(one.dtypes), shapes, f"{one.unequal} of {one.elements}", _number(one.largest_absolute),
        _number(one.largest_relative), "" if one.largest_at is None else _sides(one.largest_at),
        pair(one.nans) if any(one.nans) else "",
    ]


def _sides(numbers: Sequence[int]) -> str:
    return "[" + ",".join(map(str, numbers)) + "]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
