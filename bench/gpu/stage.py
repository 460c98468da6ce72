"""One stage, in the process that has it alone: `python -m bench.gpu.stage NAME --scratch DIRECTORY [--simulate]`."""

from __future__ import annotations

import sys
from importlib import import_module

STAGES = ("facts", "ceilings", "correctness", "faults", "performance", "kinds", "transformer", "rivals")

if __name__ == "__main__":
    stage = sys.argv.pop(1)
    if stage not in STAGES:
        sys.exit(f"bench.gpu.stage: unknown stage {stage!r}; there are {', '.join(STAGES)}")
    import_module(f"bench.gpu.{stage}").main()
