"""Text that every machine with Python has: the source and docstrings of its standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch

# Installed by other packages, or missing in some distributions: the rest is nearly the same everywhere.
_OTHERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})


def files(root: Path) -> list[Path]:
    """The library's source files, sorted by path; those of tests and of other packages left out."""
    found = (path for path in root.rglob("*.py") if _OTHERS.isdisjoint(path.relative_to(root).parts))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read(limit_bytes: int, root: Path | None = None) -> bytes:
    """The first `limit_bytes` of the concatenated files: the same at every call."""
    library = root or Path(sysconfig.get_path("stdlib"))
    parts, room = [], limit_bytes
    for path in files(library):
        part = path.read_bytes()[:room]
        parts.append(part)
        room -= len(part)
        if room == 0:
            break
    text = b"".join(parts)
    if not text:
        raise FileNotFoundError(f"no Python source in {library}: the demo trains on the standard library's")
    return text


class Loader:
    """Endless batches of random windows of a text; its position can be saved and restored.

    Bytes are the tokens; the target of each byte is the one after it.
    """

    def __init__(self, text: bytes, *, batch: int, length: int, seed: int) -> None:
        if len(text) <= length + 1:
            raise ValueError(f"a text of {len(text)} bytes has no window of {length + 1}")
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._digest = hashlib.sha256(text).hexdigest()
        self._batch, self._length = batch, length
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn = 0

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64, both of shape (batch, length)."""
        starts = torch.randint(len(self._text) - self._length, (self._batch, 1), generator=self._generator)
        windows = self._text[starts + torch.arange(self._length + 1)].long()
        self._drawn += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, object]:
        return {"drawn": self._drawn, "text": self._digest, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if state["text"] != self._digest:
            raise ValueError("the text is not the one that this run was trained on")
        drawn, generator = state["drawn"], state["generator"]
        assert isinstance(drawn, int), "from our own state_dict"
        assert isinstance(generator, torch.Tensor), "from our own state_dict"
        self._drawn = drawn
        self._generator.set_state(generator)
