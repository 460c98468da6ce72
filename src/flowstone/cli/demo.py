"""`flowstone demo`: kills a training run repeatedly, and checks whether each claim about Flowstone held."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flowstone.cli.output import AsJson, errors_reported, print_json
from flowstone.extensions import missing_torch


def demo(
    directory: Annotated[Path | None, typer.Option(help="A directory to work in, new or empty.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the training and kills; default: new.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the stores and logs.")] = False,
    small: Annotated[bool, typer.Option("--small", help="Run for seconds: a tiny model, few kills.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a GPT, kill it repeatedly, resume, compare bit for bit. Exit status 0 if every claim was confirmed."""
    with errors_reported(as_json):
        if find_spec("torch") is None:
            raise missing_torch("the demo")
    from rich.console import Console

    from flowstone_demo import acts, claims  # only this verb needs it

    judged: list[claims.Claim] = []
    console = Console(highlight=False, stderr=as_json)  # with --json, standard output has nothing but JSON
    status = acts.run(directory=directory, seed=seed, keep=keep, small=small, console=console, judged=judged)
    if as_json:
        rows = [{"claim": claim.text, "held": claim.held, "found": claim.observed} for claim in judged]
        print_json({"held": status == 0, "claims": rows})
    raise typer.Exit(status)
