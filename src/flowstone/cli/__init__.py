"""The command line. Each verb has a file."""

from flowstone.cli.app import app, main

__all__ = ["app", "main"]
