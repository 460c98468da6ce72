"""`flowstone agent`: the process that keeps checkpoints in this node's memory."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from flowstone.cli.output import AsJson, errors_reported, print_json, print_rows, run_status_text

_STOP_S = 600.0


def agent(
    stop: Annotated[bool, typer.Option("--stop", help="End the agent after its pending flushes.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only show the agent's contents; do not start it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start this node's memory agent, unless it runs, and show its contents. An empty agent ends by itself."""
    from flowstone.store.memory.agent_client import start_agent, stop_agent
    from flowstone.store.memory.local_sockets import agent_directory
    from flowstone.store.memory.node_memory import list_runs

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
        runs = list_runs()
    if as_json:
        print_json({"directory": str(agent_directory()), "runs": msgspec.to_builtins(runs)})
        return
    rows = [[f"memory://{run.name}", ", ".join(map(str, run.steps)) or "none", run_status_text(run)] for run in runs]
    print_rows(("run", "steps", "kept"), rows)
