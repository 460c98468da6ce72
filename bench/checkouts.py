"""Source trees to measure: this one, and other commits, checked out and set up beside it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("runs", "bench", "pairs")  # below the repository
PYTHON = Path(".venv", "bin", "python")
HASH_DIGITS = 12


class CheckoutError(Exception):
    """A commit is unknown, or cannot be checked out or set up; the message is that of git or make."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree that is set up.

    name    its name in a comparison
    commit  abbreviated
    title   commit, date, subject, and whether files are changed since
    """

    name: str
    commit: str
    title: str
    python: Path


def resolve(repository: Path, commit: str) -> str:
    """The abbreviated hash of a commit that git knows. Raises CheckoutError."""
    try:
        commit_id = _git(repository, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    except CheckoutError as error:
        raise CheckoutError(f"{commit!r} is no commit of this repository ({error}); `git log` lists those") from error
    return commit_id[:HASH_DIGITS]


def this_tree(repository: Path, name: str) -> Tree:
    return tree(repository, name, resolve(repository, "HEAD"))


def other_tree(repository: Path, commit: str, name: str) -> Tree:
    """The tree of `commit`, an abbreviated hash: left by an earlier comparison, or made now."""
    root = repository / FOLDER / commit
    if not root.exists():
        # By force: git still knows a worktree whose folder was removed by hand.
        _git(repository, "worktree", "add", "--quiet", "--force", "--detach", str(root), commit)
    if _is_changed(root) or resolve(root, "HEAD") != commit:
        raise CheckoutError(f"{root} does not hold commit {commit} as it was: remove it, and it is checked out again")
    set_up(root)
    return tree(root, name, commit)


def set_up(root: Path) -> None:
    """By the tree's own Makefile, which skips steps that are done. Raises CheckoutError."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(["make", "setup"], cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        text = "\n".join((done.stdout + done.stderr).strip().splitlines()[-10:])
        raise CheckoutError(f"`make setup` in {root} failed:\n{text}")


def tree(root: Path, name: str, commit: str) -> Tree:
    """The tree at `root`. Raises CheckoutError if its environment has no Flowstone, or that of another tree."""
    python = root / PYTHON
    program = "import flowstone; print(flowstone.__file__)"
    try:
        output = _said([str(python), "-P", "-c", program])
    except CheckoutError as error:
        raise CheckoutError(f"{root} is not set up; `make setup` there does that: {error}") from error
    if not Path(output).resolve().is_relative_to(root.resolve()):
        raise CheckoutError(f"{python} imports Flowstone from {output}: `make setup` in {root} mends that")
    changed = ", and changes since" if _is_changed(root) else ""
    title = _git(root, "show", "--no-patch", '--format=commit %h of %cs ("%s")', commit)
    return Tree(name, commit, title + changed, python)


def _is_changed(root: Path) -> bool:
    """Whether files that git tracks differ from the commit."""
    return bool(_git(root, "status", "--porcelain", "--untracked-files=no"))


def _git(repository: Path, *arguments: str) -> str:
    return _said(["git", "-C", str(repository), *arguments])


def _said(command: list[str]) -> str:
    """Run a command; returns its standard output. Raises CheckoutError with the last line of its standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CheckoutError(str(error)) from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        raise CheckoutError(f"{Path(command[0]).name}: {lines[-1]}")
    return done.stdout.strip()
