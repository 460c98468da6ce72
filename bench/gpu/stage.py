"""One stage, alone in a process: `python -m bench.gpu.stage NAME --scratch DIRECTORY [...]`."""

from __future__ import annotations

import signal
import sys
from importlib import import_module

STAGES = ("facts", "ceilings", "correctness", "faults", "performance", "kinds", "transformer", "rivals")

if __name__ == "__main__":
    stage = sys.argv.pop(1)
    if stage not in STAGES:
        sys.exit(f"bench.gpu.stage: unknown stage {stage!r}; there are {', '.join(STAGES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it also ends its children
    import_module(f"bench.gpu.{stage}").main()
