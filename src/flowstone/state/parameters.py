"""An index of parameters: everything that an optimizer could own, by identity and by path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, cast

import torch
from msgspec.structs import replace

from flowstone.state.flat import FlatHome, Range, Span
from flowstone.state.fsdp import Wrapped
from flowstone.state.records import Shard


class Home(NamedTuple):
    """The place of a parameter in the state: its full path, and its box or range on this rank, if its type does not
    say.
    """

    path: str
    held: Shard | Range | None


class Parameters:
    """Parameters by identity and by path. Tied ones have several paths; the first names them."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._paths: list[str] = []
        self._owned: list[torch.Tensor] = []
        self._held: dict[str, Shard | Range] = dict(shards)
        self._flats: dict[int, FlatHome] = {}
        self._ties: dict[str, str] = {}  # of parameters in flat ones

    def add(self, paths: Sequence[str], owned: Sequence[torch.Tensor]) -> None:
        """Enter parameters, each under its path."""
        self._paths += paths
        self._owned += owned

    def add_flat(self, parameter: torch.Tensor, local: torch.Tensor, spans: tuple[Span, ...]) -> None:
        """Enter a flat parameter: `local` is this rank's part, and `spans` list its members by full paths."""
        self._flats[id(parameter)] = FlatHome(local, spans)

    def add_wrapped(self, base: str, fsdp: Wrapped) -> None:
        """Enter the parameters that FSDP1 has flattened, of the module at `base`, in the form that its optimizer has.
        """
        for unit in fsdp.units:
            spans = spans_below(base, unit.spans)
            ties = {f"{base}.{name}": f"{base}.{target}" for name, target in unit.ties.items()}
            if unit.originals is None:
                self.add_flat(unit.flat, unit.local, spans)
                self._ties |= ties
                continue
            by_path = dict(zip([span.name for span in spans], unit.originals, strict=True))
            self.add(list(by_path), list(by_path.values()))
            self.add(list(ties), [by_path[target] for target in ties.values()])
            self._held |= {
                span.name: span.range for span in spans if tuple(by_path[span.name].shape) != span.range.shape
            }

    def home(self, parameter: torch.Tensor) -> Home | None:
        path = self._path_of.get(id(parameter))
        return None if path is None else Home(path, self._held.get(path))

    def whole(self, parameters: Sequence[torch.Tensor]) -> list[str] | None:
        """The paths of parameters that are all whole tensors of the state; None if some are not. Fast for many."""
        if self._flats or self._held:
            return None
        paths = list(map(self._path_of.get, map(id, parameters)))
        return None if None in paths else cast("list[str]", paths)

    def flat(self, parameter: torch.Tensor) -> FlatHome | None:
        """The members of a flat parameter; None for any other parameter."""
        return self._flats.get(id(parameter))

    def first(self, path: str) -> str:
        """The path that names the parameter at `path`; `path` itself if there is none."""
        path = self._ties.get(path, path)
        found = self._by_path.get(path)
        return path if found is None else self._path_of[id(found)]

    @cached_property
    def _path_of(self) -> dict[int, str]:
        # A dict keeps the last of equal keys; in reverse order, that is the first path.
        return dict(zip(map(id, reversed(self._owned)), reversed(self._paths), strict=True))

    @cached_property
    def _by_path(self) -> dict[str, torch.Tensor]:
        return dict(zip(reversed(self._paths), reversed(self._owned), strict=True))


def spans_below(base: str, spans: Sequence[Span]) -> tuple[Span, ...]:
    return tuple(replace(span, name=f"{base}.{span.name}") for span in spans)
