"""The command line. Verbs that only read import no torch; each verb imports its modules when it runs."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from io import TextIOWrapper
from typing import Annotated

import typer

from flowstone._version import __version__
from flowstone.cli import agent, bench, demo, diff, du, export, flush, import_, ls, pack, show, tune, verify
from flowstone.cli.output import ERROR, system_error
from flowstone.extensions import missing_module

app = typer.Typer(
    help="List, inspect and verify checkpoints of large-model training. Exit status of all commands: 0: no damage and "
    "no difference, 1: damage or a difference, 2: wrong usage or a system error.", no_args_is_help=True,
    pretty_exceptions_enable=False, add_completion=False,
)
app.command()(ls.ls)
app.command()(show.show)
app.command()(du.du)
app.command()(verify.verify)
app.command()(diff.diff)
app.command()(pack.pack)
app.command()(export.export)
app.command("import")(import_.import_)
app.command()(agent.agent)
app.command()(flush.flush)
app.command()(demo.demo)
bench.app.command()(tune.tune)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """The entry point `flowstone`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # a name that the terminal cannot show is replaced, and is not an error
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app(prog_name="flowstone")
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # None if the parent process has closed it
                    stream.flush()
    except OSError as error:
        # The output that was not written stays in the stream, and Python would try to write it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno != errno.EPIPE:
            sys.stderr.write(f"{system_error(error)}\n")
        sys.exit(ERROR)
    except Exception as error:
        missing = missing_module(error, "this command") if isinstance(error, ModuleNotFoundError) else None
        if missing is None:
            traceback.print_exc()  # a defect of the program; Python would exit with status 1, which means damage
        else:
            sys.stderr.write(f"FrameworkError: {missing}\n")
        sys.exit(ERROR)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"flowstone {__version__}")
        raise typer.Exit
