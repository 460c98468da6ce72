"""`python -m flowstone_demo` runs the demo."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flowstone_demo.acts import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flowstone_demo", description="Train, kill, resume, compare.")
    parser.add_argument("--directory", type=Path, help="an empty or new directory (default: a new one in runs/)")
    parser.add_argument("--seed", type=int, help="seed of the training and the kills (default: a new one, printed)")
    parser.add_argument("--keep", action="store_true", help="keep the stores and logs")
    parser.add_argument("--small", action="store_true", help="run for seconds: a tiny model and few kills")
    parser.add_argument("--flip-bit", action="store_true", help="flip one bit of one weight, so that the demo fails")
    options = parser.parse_args()
    return run(
        directory=options.directory, seed=options.seed, keep=options.keep, small=options.small,
        flip_bit=options.flip_bit,
    )


if __name__ == "__main__":
    sys.exit(main())
