"""What the site shows beside docs/: the README as its start page, the changelog, the help of the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = os.environ.get("FLOWSTONE_PYTHON", sys.executable)  # of an environment that has the package
COLUMNS = "82"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have their source elsewhere."""
    pages = {"index.md": start_page(), "CHANGELOG.md": in_docs("CHANGELOG.md"),
             "reference/command-line.md": command_line()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fences may name their sample behind the language, which the site does not show."""
    return re.sub(r"^(```\w+) [\w-]+$", r"\1", markdown, flags=re.MULTILINE)


def start_page() -> str:
    """The README. What the site does not have is named only."""
    return re.sub(r"\[([^\]]+)\]\(examples/\)", r"`\1`", in_docs("README.md"))


def in_docs(name: str) -> str:
    """A document from the root of the repository, with links as from docs/."""
    return (ROOT / name).read_text().replace("](docs/", "](")


def command_line() -> str:
    """What `--help` says of each verb."""
    head = """# The command line

None of these needs torch, except `demo`. Exit status 0: it worked, and nothing is wrong; 1: damage or a difference was
names; 2: an error.
"""
    sections = (f"## flowstone {verb}\n\n```\n{help_of(*verb.split())}\n```\n" for verb in verbs(help_of()))
    return "\n".join([head, f"```\n{help_of()}\n```\n", *sections])


def verbs(help_text: str, prefix: str = "") -> list[str]:
    """The commands that a help lists, and those below them."""
    listed = help_text.partition("Commands")[2]
    names = []
    for name in re.findall(r"^│ ([a-z]+) ", listed, flags=re.MULTILINE):
        verb = f"{prefix}{name}"
        names += [verb, *verbs(help_of(*verb.split()), f"{verb} ")]
    return names


def help_of(*verb: str) -> str:
    """What the command says of itself, without trailing blanks."""
    environment = os.environ | {"COLUMNS": COLUMNS, "NO_COLOR": "1", "TERM": "dumb"}
    command = [PYTHON, "-m", "flowstone", *verb, "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
