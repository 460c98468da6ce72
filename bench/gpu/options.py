"""What a session is told, and what its stages print."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

Row = dict[str, object]
"""One result: "what", "value", "unit", and whatever else there is to say."""


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes are in bytes.

    simulate  on the simulated device, and small
    scratch   a directory on the disk that is measured; each stage has a new folder there
    """

    simulate: bool
    scratch: Path

    @property
    def state_bytes(self) -> int:
        """Of the state whose saves are measured."""
        return 24_000_000 if self.simulate else 20_000_000_000

    @property
    def tensors(self) -> int:
        return 30 if self.simulate else 900

    @property
    def kind_bytes(self) -> int:
        """Of one kind of state: strided, of working copies with their masters, of replicas."""
        return 12_000_000 if self.simulate else 1_000_000_000

    @property
    def device_bytes(self) -> int:
        """Of the simulated device."""
        return 192 << 20

    @property
    def step_s(self) -> float:
        """Of a step of the measured loop."""
        return 0.005 if self.simulate else 0.5


def parse(argv: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--scratch", type=Path, required=True)
    found = parser.parse_args(argv)
    return Options(found.simulate, found.scratch)


def emit(what: str, value: float | str | bool | None, unit: str = "", **more: object) -> None:
    """One result, as a line of JSON on standard output. What a stage has printed counts, also if it ends early."""
    print(json.dumps({"what": what, "value": value, "unit": unit, **more}), flush=True)


def note(text: str) -> None:
    """For whoever reads the log."""
    print(text, file=sys.stderr, flush=True)
