"""A text that exists on every machine with Python: the source of Python's standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch

# Directories that are left out, as they belong to other packages, or are missing in some distributions.
_OTHERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})


def files(root: Path) -> list[Path]:
    """The source files of the standard library, sorted by path, without tests and other packages."""
    sources = (path for path in root.rglob("*.py") if _OTHERS.isdisjoint(path.relative_to(root).parts))
    return sorted(sources, key=lambda path: path.relative_to(root).as_posix())


def read(limit_bytes: int, root: Path | None = None) -> bytes:
    """The first `limit_bytes` bytes of all files together. Every call returns the same bytes."""
    library = root or Path(sysconfig.get_path("stdlib"))
    parts, left_bytes = [], limit_bytes
    for path in files(library):
        part = path.read_bytes()[:left_bytes]
        parts.append(part)
        left_bytes -= len(part)
        if left_bytes == 0:
            break
    text = b"".join(parts)
    if not text:
        raise FileNotFoundError(f"no Python source in {library}: the demo trains on the source of the standard library")
    return text


class Loader:
    """A loader without an end. Each batch consists of random excerpts of a text. The loader's position can be saved and
    restored.

    Each byte is a token, and its target is the next byte.
    """

    def __init__(self, text: bytes, *, batch: int, length: int, seed: int) -> None:
        if len(text) <= length + 1:
            raise ValueError(f"a text of {len(text)} bytes is too short for samples of {length + 1} bytes")
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._digest = hashlib.sha256(text).hexdigest()
        self._batch, self._length = batch, length
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn = 0

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and the targets of the next batch, both int64 of shape (batch, length)."""
        starts = torch.randint(len(self._text) - self._length, (self._batch, 1), generator=self._generator)
        windows = self._text[starts + torch.arange(self._length + 1)].long()
        self._drawn += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, object]:
        return {"drawn": self._drawn, "text": self._digest, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if state["text"] != self._digest:
            raise ValueError("the text differs from the text that this run was trained on")
        drawn, generator = state["drawn"], state["generator"]
        assert isinstance(drawn, int), "from our own state_dict"
        assert isinstance(generator, torch.Tensor), "from our own state_dict"
        self._drawn = drawn
        self._generator.set_state(generator)
