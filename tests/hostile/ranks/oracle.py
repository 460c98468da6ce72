"""The expected contents of a job's checkpoint, determined without the library: each rank's tensors, and the files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from format.plain_reader import read
from hostile.oracle import NOT_COMPARED, digest, digest_of
from hostile.ranks.states import Holding, Part


@dataclass(frozen=True, slots=True)
class Seen:
    """A part of a tensor: its place in the tensor, and a digest of its bytes."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    offset: tuple[int, ...]
    begin: int | None
    holding: Holding
    digest: tuple[str, bytes]


Contents = dict[str, Seen]
"""The parts that one rank holds, by name."""


def contents_of(parts: Sequence[Part]) -> Contents:
    """The parts that a rank holds now."""
    return {
        part.name: Seen(
            part.shape, tuple(part.local.shape), part.offset, part.begin, part.holding, digest_of(part.local)
        )
        for part in parts
    }


class Stored:
    """A checkpoint's files, by a reader that shares no code with the library."""

    def __init__(self, directory: Path) -> None:
        tensors, self.replicated, self.per_rank = read(directory)
        self.tensors: Mapping[str, np.ndarray] = {
            name: tensor for name, tensor in tensors.items() if _section(name) not in NOT_COMPARED
        }
        self._digests: dict[tuple[object, ...], tuple[str, bytes]] = {}

    def differences(self, ranks: Mapping[int, Contents], *, saved: bool = True) -> list[str]:
        """Differences between the files and the ranks' parts, after a save (`saved`) or after a load.

        A buffer must have the value of the lowest rank that has it.
        """
        lines = []
        names: set[str] = set()
        for rank, contents in sorted(ranks.items()):
            for name, seen in contents.items():
                stored = name
                if not saved and "@" in name:  # rank r gets the objects of rank r modulo the number of ranks that saved
                    section, _, rest = name.partition("@")
                    number, dot, rest = rest.partition(".")
                    stored = f"{section}@{int(number) % self.ranks(section)}{dot}{rest}"
                known = stored in names
                names.add(stored)
                if saved and seen.holding == "buffer" and known:
                    continue
                words = self._differs(stored, seen)
                if words:
                    lines.append(f"{name} of rank {rank} {words}")
        if saved:
            lines += [f"{name} is too much" for name in self.tensors.keys() - names]
        return sorted(lines)

    def ranks(self, section: str) -> int:
        """The number of ranks that have saved objects of their own."""
        return len(self.per_rank[section])

    def _differs(self, name: str, seen: Seen) -> str:
        whole = self.tensors.get(name)
        if whole is None:
            return "is missing"
        if tuple(whole.shape) != seen.shape:
            return f"has the shape {whole.shape}, not {seen.shape}"
        key = (name, seen.begin, seen.offset, seen.local)
        if key not in self._digests:
            if seen.begin is not None:
                array = whole.reshape(-1)[seen.begin : seen.begin + math.prod(seen.local)]
            else:
                array = whole[tuple(slice(o, o + n) for o, n in zip(seen.offset, seen.local, strict=True))]
            self._digests[key] = digest(array)
        return "" if self._digests[key] == seen.digest else "differs"


def _section(name: str) -> str:
    return name.partition(".")[0].partition("@")[0]


def steps_in(root: Path) -> dict[int, Path]:
    return {int(path.name.removeprefix("step-")): path for path in sorted(root.glob("step-*")) if "." not in path.name}


def note_of(stored: Stored) -> Any:
    return stored.replicated.get("note")
