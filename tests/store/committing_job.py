"""A job that commits step 2 and sees no lock: URL, its number, and how many numbers its tensor has (0: it has none)."""

from __future__ import annotations

import contextlib
import sys

import numpy as np

import flowstone as fs
from flowstone.store.objects.store import ObjectStore
from flowstone.store.wrap import Wrapper


class Unlocked(Wrapper):
    def lock(self, holder: str) -> None: ...
    def check_lock(self) -> None: ...
    def unlock(self) -> None: ...


def main() -> None:
    url, number, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    state: dict[str, object] = {"job": number}
    if count:
        state["x"] = np.full(count, float(number))
    ckpt = fs.Checkpointer(Unlocked(ObjectStore(url)))
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        ckpt.save(2, state).committed.result(60)
    except fs.FlowstoneError as error:
        print("refused", type(error).__name__, error.message, flush=True)
    else:
        print("committed", flush=True)
    with contextlib.suppress(fs.FlowstoneError):  # the same failure again, if it was not given yet
        ckpt.close()


if __name__ == "__main__":
    main()
