"""The option --rules of import, export and diff. Its value is a file with rules, or the name of a ready rule set with
sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowstone.errors import ArgumentError, NoCheckpointError, NotAStoreError

if TYPE_CHECKING:
    from flowstone.layouts.layout_rules import RuleSet
    from flowstone.rules.load_rules import Skip

RulesOption = Annotated[
    str | None,
    typer.Option("--rules", metavar="RULES", help="File of rules, or a ready set such as megatron-to-llama:heads=32."),
]
Inverse = Annotated[bool, typer.Option("--inverse", help="Apply the inverse of the rules.")]


def conversion_rules(
    given: str | None, skip: Sequence[str] | None, *, inverse: bool,
    configured: Sequence[tuple[Path | None, int | None]] = (),
) -> list[Skip | RuleSet]:
    """The rules of --skip and --rules.

    configured  paths of checkpoints (with the step, for stores). A ready rule set takes its sizes from the first
                config.json that is found in them
    """
    from flowstone.rules.load_rules import Skip

    rules: list[Skip | RuleSet] = [Skip(pattern) for pattern in skip or ()]
    if given is None:
        if inverse:
            raise ArgumentError("--inverse was given without --rules", next="add --rules with the rules to invert")
        return rules
    rule_set = _rule_set(given, configured)
    return [*rules, rule_set.inverse if inverse else rule_set]


def _rule_set(given: str, configured: Sequence[tuple[Path | None, int | None]]) -> RuleSet:
    from flowstone.convert.ready_rules import ready_rules
    from flowstone.convert.rule_files import read_rules

    if Path(given).expanduser().is_file():
        return read_rules(given)
    name, _, listed = given.partition(":")
    sizes = dict(_pair(size) for size in listed.split(",") if size)
    configs = (_config(path, step) for path, step in configured if path is not None)
    config = next((config for config in configs if config), None)
    return ready_rules(name, config, **sizes)


def _config(path: Path, step: int | None) -> bytes | None:
    """The model's config.json, from its directory or from a store. None if there is none."""
    from flowstone.convert.documents import read_stored_document, stored_documents
    from flowstone.reading.checkpoint import open_checkpoint

    if (path / "config.json").is_file():
        return (path / "config.json").read_bytes()
    try:
        checkpoint = open_checkpoint(path, step)
    except (NoCheckpointError, NotAStoreError):  # another format, or no checkpoint; the conversion itself reports that
        return None
    document = stored_documents(checkpoint).get("config.json")
    return None if document is None else read_stored_document(checkpoint, document)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip() or not value.strip():
        raise ArgumentError(
            f"--rules: {text!r:.60} is not a size such as heads=32", next="write megatron-to-llama:heads=32,groups=8"
        )
    return name.strip(), value.strip()
