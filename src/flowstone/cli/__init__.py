"""The command line: one file per verb."""

from flowstone.cli.app import app, main

__all__ = ["app", "main"]
