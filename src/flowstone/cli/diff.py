"""`flowstone diff`: the differences between two checkpoints of any known formats."""

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

_LISTED_MAX = 100  # how many differences of each kind are printed; JSON has all of them


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A store, or one checkpoint, of any known format.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other store or checkpoint.")],
    step_a: Annotated[int | None, typer.Option("--step-a", help="Step of store A; default: the newest.")] = None,
    step_b: Annotated[int | None, typer.Option("--step-b", help="Step of store B; default: the newest.")] = None,
    section: Annotated[
        str | None, typer.Option("--section", help="Compare only this section; '' for all, by full name. Default: all.")
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--names", metavar="PATTERN", help="Compare only matching names; repeatable. Default: all."),
    ] = None,
    skip: Skips = None,
    rules: RulesOption = None,
    inverse: Inverse = False,
    rtol: Annotated[float, typer.Option("--rtol", help="Values are equal if |a - b| <= atol + rtol * |b|.")] = 0.0,
    atol: Annotated[float, typer.Option("--atol", help="See --rtol.")] = 0.0,
    ignore_dtype: Annotated[bool, typer.Option("--ignore-dtype", help="Different dtypes may be equal.")] = False,
    trust_digests: Annotated[
        bool, typer.Option("--trust-digests", help="Flowstone tensors with equal digests count as equal, unread.")
    ] = False,
    digests_only: Annotated[
        bool, typer.Option("--digests-only", help="For two Flowstone checkpoints: count differing chunks, read none.")
    ] = False,
    budget_bytes: Budget = "512MiB",  # type: ignore[assignment]
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints by name and value. Exit status 0: equal, 1: different or damaged, 2: an error."""
    from flowstone.convert.diff import diff as run

    with errors_reported(as_json):
        chosen = conversion_rules(rules, None, inverse=inverse, configured=((b, step_b), (a, step_a)))
        with terminal_progress("comparing") as show:
            report = run(
                a, b, step_a=step_a, step_b=step_b, section=section, names=names or "*", skip=skip or (), rules=chosen,
                rtol=rtol, atol=atol, ignore_dtype=ignore_dtype, trust_digests=trust_digests,
                digests_only=digests_only, budget_bytes=budget_bytes, on_progress=show,
            )
    if as_json:
        print_json({"equal": report.equal, **asdict(report), "tensors": [_json(tensor) for tensor in report.tensors]})
    else:
        _print(report)
    if not report.equal:
        raise typer.Exit(DAMAGE)


def _json(tensor: TensorDiff) -> dict[str, object]:
    """The fields of a difference, for JSON. An infinite value becomes text, as JSON has no such number."""
    return {key: str(value) if value == math.inf else value for key, value in asdict(tensor).items()}


def _print(report: DiffReport) -> None:
    for path, names in ((report.a, report.only_in_a), (report.b, report.only_in_b)):
        _print_list(f"only in {path}", names)
    _print_list("tied in the other checkpoint, stored there under another name", report.tied_names)
    _print_list("values that differ", [
        f"{diff.name}: {diff.values[0] or 'missing'} against {diff.values[1] or 'missing'}" for diff in report.values
    ])
    rows = [_row(tensor) for tensor in report.differing]
    if rows:
        titles = ("tensor", "type", "shape", "unequal", "largest", "relative", "at", "NaNs")
        print_rows(titles, rows[:_LISTED_MAX])
    if len(rows) > _LISTED_MAX:
        typer.echo(f"... and {len(rows) - _LISTED_MAX} more: --json lists all")
    count = len(report.tensors)
    if report.equal:
        summary = f"equal: {count} tensors"
    else:
        summary = f"different: {count - len(rows)} of {count} tensors that both have are equal"
    by_digest = sum(tensor.by_digest for tensor in report.tensors)
    summary += f" ({by_digest} by their digests)" if by_digest else ""
    typer.echo(f"{summary}; {size_text(report.bytes)} compared, {report.seconds:.1f} s")


def _print_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        typer.echo(printable(f"{title}: {len(lines)}"))
        more = [f"... and {len(lines) - _LISTED_MAX} more"] if len(lines) > _LISTED_MAX else []
        for line in (*lines[:_LISTED_MAX], *more):
            typer.echo(printable(f"  {line}"))


def _row(tensor: TensorDiff) -> list[str]:
    def pair(texts: tuple[object, object]) -> str:
        return str(texts[0]) if texts[0] == texts[1] else f"{texts[0]} / {texts[1]}"

    shapes = pair((_sides(tensor.shapes[0]), _sides(tensor.shapes[1])))
    first = [tensor.name, pair(tensor.dtypes), shapes]
    if tensor.chunks is not None:
        return [*first, f"{tensor.chunks[0]} of {tensor.chunks[1]} chunks", "", "", "", ""]
    if tensor.unequal is None:
        return [*first, "not compared", "", "", "", ""]
    return [
        *first, f"{tensor.unequal} of {tensor.elements}", _number(tensor.largest_absolute),
        _number(tensor.largest_relative), "" if tensor.largest_at is None else _sides(tensor.largest_at),
        pair(tensor.nans) if any(tensor.nans) else "",
    ]


def _sides(numbers: Sequence[int]) -> str:
    return "[" + ",".join(map(str, numbers)) + "]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
