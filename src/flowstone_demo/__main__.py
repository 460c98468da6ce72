"""`python -m flowstone_demo`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flowstone_demo.acts import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flowstone_demo", description="Train, kill, resume, compare.")
    parser.add_argument("--directory", type=Path, help="where to work: absent or empty (default: a new one in runs/)")
    parser.add_argument("--seed", type=int, help="of the training and of the kills (default: a new one, printed)")
    parser.add_argument("--keep", action="store_true", help="leave the stores and logs behind")
    parser.add_argument("--small", action="store_true", help="a tiny model and few kills, in seconds")
    parser.add_argument("--flip-bit", action="store_true", help="falsify one bit of one weight: the demo must fail")
    options = parser.parse_args()
    return run(
        directory=options.directory, seed=options.seed, keep=options.keep, small=options.small,
        flip_bit=options.flip_bit,
    )


if __name__ == "__main__":
    sys.exit(main())
