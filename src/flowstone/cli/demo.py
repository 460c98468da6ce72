"""`flowstone demo`: a training run that is killed again and again, with a verdict on every claim."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flowstone.cli.output import AsJson, errors_reported, print_json
from flowstone.errors import FlowstoneError


def demo(
    directory: Annotated[Path | None, typer.Option(help="A directory to work in, new or empty.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the training and kills; default: new.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the stores and logs.")] = False,
    small: Annotated[bool, typer.Option("--small", help="Take seconds: a tiny model, few kills.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a GPT, kill it again and again, resume, compare bit for bit. Exit status 0 if every claim held."""
    with errors_reported(as_json):
        if find_spec("torch") is None:
            install = "pip install 'flowstone[torch]'"
            raise FlowstoneError("the demo trains with torch, which is not installed", next=install)
    from rich.console import Console

    from flowstone_demo import acts, claims  # only this verb needs it

    judged: list[claims.Claim] = []
    console = Console(highlight=False, stderr=as_json)  # standard output is for JSON only
    status = acts.run(directory=directory, seed=seed, keep=keep, small=small, console=console, judged=judged)
    if as_json:
        rows = [{"claim": claim.text, "held": claim.held, "found": claim.found} for claim in judged]
        print_json({"held": status == 0, "claims": rows})
    raise typer.Exit(status)
