"""Text that every machine with Python has, as tokens: the source of its standard library, in words.

It does not use Flowstone's demo, because a rival's process must not import Flowstone.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch

from bench.training.records import Window

_OTHERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})
_PIECE = re.compile(r"\w+|\s+|[^\w\s]")  # a word, white space, or a sign
UNKNOWN = 0


def library() -> str:
    """The standard library's source, file after file in the order of their paths; 11 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if _OTHERS.isdisjoint(path.relative_to(root).parts))
    text = "".join(path.read_text(errors="replace") for path in sorted(paths))
    if not text:
        raise FileNotFoundError(f"no Python source in {root}: there is nothing to train on")
    return text


def tokens(text: str, vocabulary: int) -> torch.Tensor:
    """int64: every piece's rank among the `vocabulary` - 1 most frequent ones, from 1 on; UNKNOWN for others."""
    pieces = _PIECE.findall(text)
    ranks = {piece: rank for rank, (piece, _) in enumerate(Counter(pieces).most_common(vocabulary - 1), 1)}
    return torch.tensor([ranks.get(piece, UNKNOWN) for piece in pieces])


class Windows:
    """Random windows of a text, without end; the target of each token is the one after it."""

    def __init__(self, text: torch.Tensor, window: Window, seed: int) -> None:
        self._text, self._window = text, window
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, both int64 of shape (batch, length)."""
        batch, length = self._window.batch, self._window.length
        starts = torch.randint(len(self._text) - length, (batch, 1), generator=self._generator)
        windows = self._text[starts + torch.arange(length + 1)]
        return windows[:, :-1], windows[:, 1:]
