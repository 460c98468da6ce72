"""Refill paragraphs of documents that have a long line: `python tools/wrap_documents.py [FILE...]`, or all of docs/.

Tables, headings, samples, and sections that benchmarks write stay unchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

COLUMNS = 120
_ROOT = Path(__file__).resolve().parent.parent
_ITEM = re.compile(r"( *)([-*] |\d+\. )")
_WORD = re.compile(r"(?:`[^`]{1,90}`|\[[^\][]{1,25}\]\(|[^\s`]|`)+")  # neither code nor a short link is broken
_NOT_FIRST = re.compile(r"[-+*]$|\d+[.)]$|[#>|]|!!!|```")  # would begin a list, a heading or a table


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbers and lines of prose that can be wrapped: no samples, tables, headings, or sections between marks."""
    is_code = is_made = False
    for number, line in enumerate(text.splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        is_mark = line.startswith("<!--")
        is_made = (is_made and not line.endswith(":end -->")) or line.endswith(":start -->")
        if not (is_code or is_fence or is_mark or is_made or line.lstrip().startswith(("|", "#", "::: ", "<"))):
            yield number, line


def is_too_long(line: str) -> bool:
    """Whether the line is too long; a line of one word, such as a link, cannot be shorter."""
    return len(line) > COLUMNS and len(_words(_ITEM.sub("", line, count=1))) > 1


def wrapped(text: str) -> str:
    """The text, with each paragraph or list item filled again in which a line is too long."""
    lines: list[str] = []
    block: list[str] = []
    plain = dict(prose(text))
    for number, line in enumerate([*text.splitlines(), ""], 1):
        goes_on = number in plain and bool(line.strip())
        if block and (not goes_on or _ITEM.match(line)):
            lines += _filled(block) if any(map(is_too_long, block)) else block
            block = []
        if goes_on:
            block.append(line)
        else:
            lines.append(line)
    return "\n".join(lines[:-1]) + "\n"


def _filled(block: list[str]) -> list[str]:
    item = _ITEM.match(block[0])
    first = item[0] if item else " " * (len(block[0]) - len(block[0].lstrip()))
    lines, line = [], first.rstrip() if item else first
    for word in _words(" ".join([block[0][len(first):], *block[1:]])):
        joined = f"{line} {word}" if line.strip() else f"{line}{word}"
        if len(joined) > COLUMNS and line.strip() not in ("", first.strip()):
            lines.append(line)
            joined = " " * len(first) + word
        line = joined
    return [*lines, line]


def _words(text: str) -> list[str]:
    words: list[str] = []
    for word in _WORD.findall(text):
        if words and _NOT_FIRST.match(word):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def main() -> None:
    for path in map(Path, sys.argv[1:] or sorted(map(str, (_ROOT / "docs").rglob("*.md")))):
        path.write_text(wrapped(path.read_text()))


if __name__ == "__main__":
    main()
