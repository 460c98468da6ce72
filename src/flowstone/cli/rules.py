"""The option --rules of import, export and diff: a file of rules, or a ready set with its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowstone.errors import ArgumentError, NoCheckpointError, NotAStoreError

if TYPE_CHECKING:
    from flowstone.layout_rules import RuleSet
    from flowstone.rules import Skip

RulesOption = Annotated[
    str | None,
    typer.Option("--rules", metavar="RULES", help="A file of rules, or megatron-to-llama:heads=32,groups=8 and such."),
]
Inverse = Annotated[bool, typer.Option("--inverse", help="The inverse of the file of rules.")]


def conversion_rules(
    given: str | None, skip: Sequence[str] | None, *, inverse: bool,
    configured: Sequence[tuple[Path | None, int | None]] = (),
) -> list[Skip | RuleSet]:
    """What --skip and --rules say.

    configured  places, and steps of those that are stores: a ready set takes sizes from the first config.json there
    """
    from flowstone.rules import Skip

    rules: list[Skip | RuleSet] = [Skip(pattern) for pattern in skip or ()]
    if given is None:
        if inverse:
            raise ArgumentError("--inverse is given without --rules", next="say which rules are to be inverted")
        return rules
    found = _rule_set(given, configured)
    return [*rules, found.inverse if inverse else found]


def _rule_set(given: str, configured: Sequence[tuple[Path | None, int | None]]) -> RuleSet:
    from flowstone.convert.ready_rules import ready_rules
    from flowstone.convert.rule_files import read_rules

    if Path(given).expanduser().is_file():
        return read_rules(given)
    name, _, listed = given.partition(":")
    sizes = dict(_pair(one) for one in listed.split(",") if one)
    config = next((one for place, step in configured if place is not None and (one := _config(place, step))), None)
    return ready_rules(name, config, **sizes)


def _config(place: Path, step: int | None) -> bytes | None:
    """The configuration beside a model's tensors, or kept with them in a store."""
    from flowstone.checkpoint import open_checkpoint
    from flowstone.convert.documents import kept_documents, read_kept

    if (place / "config.json").is_file():
        return (place / "config.json").read_bytes()
    try:
        checkpoint = open_checkpoint(place, step)
    except (NoCheckpointError, NotAStoreError):  # another format, or nothing: the conversion says what it is
        return None
    kept = kept_documents(checkpoint).get("config.json")
    return None if kept is None else read_kept(checkpoint, kept)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip() or not value.strip():
        raise ArgumentError(f"--rules: {text!r:.60} is no size", next="write megatron-to-llama:heads=32,groups=8")
    return name.strip(), value.strip()
