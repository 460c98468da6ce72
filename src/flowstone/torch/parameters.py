"""An index of all tensors of a state that an optimizer could have as parameters, by identity and by path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, cast

import torch
from msgspec.structs import replace

from flowstone.state.records import Shard
from flowstone.torch.flat import FlatMember, FlatParameter, FlatSlice
from flowstone.torch.fsdp1 import FsdpModule


class ParameterHome(NamedTuple):
    """Where a parameter is in the state: its full path; and which region or range of the full parameter this rank has,
    if the parameter's type does not say that.
    """

    path: str
    held: Shard | FlatSlice | None


class ParameterIndex:
    """Parameters by identity and by path. Tied parameters have several paths; the first one is their name."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._paths: list[str] = []
        self._owned: list[torch.Tensor] = []
        self._held: dict[str, Shard | FlatSlice] = dict(shards)
        self._flats: dict[int, FlatParameter] = {}
        self._ties: dict[str, str] = {}  # of parameters in flat parameters: a further path -> the first path

    def add(self, paths: Sequence[str], owned: Sequence[torch.Tensor]) -> None:
        """Add parameters, each with its path."""
        self._paths += paths
        self._owned += owned

    def add_flat(self, parameter: torch.Tensor, local: torch.Tensor, spans: tuple[FlatMember, ...]) -> None:
        """Add a flat parameter. `local`: this rank's part of it. `spans`: the parameters in it, with full paths."""
        self._flats[id(parameter)] = FlatParameter(local, spans)

    def add_wrapped(self, base: str, fsdp: FsdpModule) -> None:
        """Add the parameters that FSDP1 has flattened in the module at path `base`, by the tensors that the optimizer
        has for them.
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

    def home(self, parameter: torch.Tensor) -> ParameterHome | None:
        path = self._path_of.get(id(parameter))
        return None if path is None else ParameterHome(path, self._held.get(path))

    def whole(self, parameters: Sequence[torch.Tensor]) -> list[str] | None:
        """The paths of these parameters, if all are full tensors of the state; otherwise None. Fast also for thousands.
        """
        if self._flats or self._held:
            return None
        paths = list(map(self._path_of.get, map(id, parameters)))
        return None if None in paths else cast("list[str]", paths)

    def flat(self, parameter: torch.Tensor) -> FlatParameter | None:
        """The members of a flat parameter; None for any other parameter."""
        return self._flats.get(id(parameter))

    def first(self, path: str) -> str:
        """The first of all paths of the parameter at `path`, which is its name; `path` itself if no parameter is there.
        """
        path = self._ties.get(path, path)
        parameter = self._by_path.get(path)
        return path if parameter is None else self._path_of[id(parameter)]

    @cached_property
    def _path_of(self) -> dict[int, str]:
        # A dict keeps the last of equal keys; in reverse order, that is the first path.
        return dict(zip(map(id, reversed(self._owned)), reversed(self._paths), strict=True))

    @cached_property
    def _by_path(self) -> dict[str, torch.Tensor]:
        return dict(zip(reversed(self._paths), reversed(self._owned), strict=True))


def spans_below(base: str, spans: Sequence[FlatMember]) -> tuple[FlatMember, ...]:
    return tuple(replace(span, name=f"{base}.{span.name}") for span in spans)
