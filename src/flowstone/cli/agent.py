"""`flowstone agent`: the process that keeps checkpoints in this node's memory."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from flowstone.cli.output import AsJson, errors_reported, print_json, print_rows, told

_STOP_S = 600.0


def agent(
    stop: Annotated[bool, typer.Option("--stop", help="End it, once it has made durable what it is to.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only tell what it holds; start none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start this node's memory agent, unless it runs, and tell what it holds. It ends by itself once it holds nothing.
    """
    from flowstone.store.agent_client import start_agent, stop_agent
    from flowstone.store.local_sockets import agent_directory
    from flowstone.store.node_memory import held_runs

    with errors_reported(as_json):
        if stop:
            stopped = stop_agent(_STOP_S)
            if as_json:
                print_json({"stopped": stopped})
            else:
                typer.echo("no memory agent runs" if stopped is None else f"process {stopped} has ended")
            return
        if not status:
            start_agent(agent_directory())
        runs = held_runs()
    if as_json:
        print_json({"directory": str(agent_directory()), "runs": msgspec.to_builtins(runs)})
        return
    rows = [[f"memory://{run.name}", ", ".join(map(str, run.steps)) or "none", told(run)] for run in runs]
    print_rows(("run", "steps", "kept"), rows)
