"""`flowstone bench`: measures the file system of a directory. Each verb has a function; none of them needs torch."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from flowstone.cli.output import ERROR, errors_reported, make_console, parse_size, print_json
from flowstone.config import MIB
from flowstone.runtime.progress import terminal_steps

_BYTES_MIN = 8 * MIB  # smaller runs are too fast to measure


class _Bench(TyperGroup):
    """Lets the user give `--probe` without a path. It then probes the current directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _completed(args, "--probe", alone=".", value=r"[^-].*"))


class _Io(TyperCommand):
    """Lets the user give `--json` without a file, as in every other command. It then writes to standard output."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Only a word that ends with .json is taken as the file, so in `--json PATH`, PATH is the directory to measure.
        return super().parse_args(ctx, _completed(args, "--json", alone="-", value=r"[^-].*\.json"))


app = typer.Typer(cls=_Bench, help="Measure what a file system can do.", no_args_is_help=True)


def _parse_bytes(text: str) -> int:
    size = parse_size(text)
    if size < _BYTES_MIN:
        raise typer.BadParameter(f"{text} is less than 8 MiB, which is too little to measure")
    return size


def _parse_mix(text: str) -> str:
    from flowstone_study.records import MIXES

    if text not in MIXES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(MIXES)}")
    return text


@app.callback(invoke_without_command=True)
def _root(
    probe: Annotated[
        Path | None, typer.Option("--probe", metavar="[PATH]", help="Show supported features: io_uring, O_DIRECT, ...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --probe: print JSON.")] = False,
) -> None:
    if probe is None:
        return
    from flowstone_study.prepare import probe_at
    from flowstone_study.report import probe_lines

    with errors_reported(as_json, writes=True):
        support = probe_at(probe)
    if as_json:
        print_json(asdict(support))
    else:
        make_console().print(f"{probe}: {support.file_system}, {support.kernel}", markup=False)
        for line in probe_lines(support):
            make_console().print(line, markup=False)
    raise typer.Exit


@app.command(cls=_Io)
def io(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A directory on the file system to measure.")],
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer points, in under two minutes.")] = False,
    size: Annotated[
        int | None,
        typer.Option("--bytes", parser=_parse_bytes, metavar="SIZE", help="Per cell: 256MiB, 2GB. Default: 1GiB."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, max=4, help="Most processes that run at a time.")] = 4,
    mix: Annotated[
        list[str] | None,
        typer.Option("--mix", parser=_parse_mix, metavar="MIX", help="synthetic, 3B, 7B, 13B; repeat. Default: all."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Samples per cell.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="[FILE]", help="Write results to FILE (.json) or standard output.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write one row per sample.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write plots into one file.")] = None,
) -> None:
    """Measure saves and restores at PATH: layout, coalescing, buffering, interface, request size, depth, memory.

    It writes only into a new directory in PATH, and removes it. docs/STUDY.md explains the results.
    """
    from flowstone_study import campaign, export, page, terminal
    from flowstone_study.prepare import Settings, finish, prepare
    from flowstone_study.records import MIXES
    from flowstone_study.summary import cell_label, summarise

    for file in (None if json_file in (None, "-") else Path(str(json_file)), csv_file, html_file):
        if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            # checked before the measurement
            raise typer.BadParameter(f"cannot write a file at {file}: give another path")
    mixes = tuple(name for name in MIXES if not mix or name in mix)
    settings = Settings(quick=quick, bytes=size, processes=processes, mixes=mixes, rounds=rounds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # otherwise SIGTERM would leave the measurement's files
    with errors_reported(json_file == "-", writes=True):
        prepared = prepare(path, settings)
        plan = prepared.plan
        samples = []
        measuring = campaign.measure(path, plan.cells, plan.base, rounds=prepared.rounds, limit_s=prepared.limit_s)
        with closing(measuring), terminal_steps() as show:
            for sample in measuring:
                samples.append(sample)
                title = f"{sample.cell.direction}, {cell_label(sample.cell)}"
                show(title, len(samples), len(plan.cells) * prepared.rounds)
    study = finish(prepared, samples)
    summary = summarise(samples)
    if json_file == "-":
        typer.echo(export.to_json(study), nl=False)
    else:
        for shown in terminal.renderables(study, plan, summary):
            make_console().print(shown)
        if json_file:
            Path(json_file).write_text(export.to_json(study), encoding="utf-8")
    if csv_file:
        csv_file.write_text(export.to_csv(study), encoding="utf-8")
    if html_file:
        html_file.write_text(page.to_html(study, plan, summary), encoding="utf-8")
    if not summary.measured:
        raise typer.Exit(ERROR)


def _completed(args: Sequence[str], option: str, *, alone: str, value: str) -> list[str]:
    """Insert the value `alone` after `option`, if the next word does not match the pattern `value`."""
    words: list[str] = []
    for word, following in zip(args, [*args[1:], None], strict=True):
        words.append(word)
        if word == option and (following is None or not re.fullmatch(value, following)):
            words.append(alone)
    return words
