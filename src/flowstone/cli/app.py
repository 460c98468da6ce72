"""The command line. Reading verbs import no torch; each verb imports what it needs when it runs."""

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
from flowstone.cli.output import ERROR, refused

app = typer.Typer(
    help="List, inspect and verify checkpoints of large-model training. Exit status of all verbs: 0: all is sound, "
    "1: damage, or a difference, 2: an error of use or of the system.", no_args_is_help=True,
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
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no error
    try:
        try:
            app(prog_name="flowstone")
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # closed by the parent process
                    stream.flush()
    except OSError as error:
        # Unwritten output stays in the stream, and Python would try to write it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno != errno.EPIPE:
            sys.stderr.write(f"{refused(error)}\n")
        sys.exit(ERROR)
    except Exception:
        traceback.print_exc()  # a fault of the program's own: Python would exit with the status that means damage
        sys.exit(ERROR)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"flowstone {__version__}")
        raise typer.Exit
