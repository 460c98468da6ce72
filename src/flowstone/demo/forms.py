"""The sizes of a demo: one form to show, one for the tests."""

from __future__ import annotations

import msgspec


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Every number of a demo that is not a matter of chance.

    length        of a training window, in bytes of text
    save_every    steps from one save to the next in act two
    kills         how many SIGKILLs are planned, of which `aimed` wait for a save to begin
    kills_min     how many must have been
    torn          how many of them must have left a torn save behind
    kills_max     after so many without enough torn saves the demo gives up
    free_bytes    room that the stores, with one more save in flight, and torch.save's file need
    """

    width: int
    depth: int
    heads: int
    length: int
    batch: int
    corpus_bytes: int
    steps: int
    save_every: int
    kills: int
    kills_min: int
    aimed: int
    torn: int
    kills_max: int
    free_bytes: int
    dropout: float = 0.1
    learning_rate: float = 6e-4
    warmup_steps: int = 10
    torch_saves: int = 3
    threads: int = 2


# 25.4 million parameters. A step of 256 bytes of text took 0.33 s on two cores, these 192 take less.
FULL = Form(
    width=512, depth=8, heads=8, length=48, batch=4, corpus_bytes=4_000_000, steps=80, save_every=4,
    kills=6, kills_min=5, aimed=4, torn=2, kills_max=12, free_bytes=2_500_000_000,
)

# 3.2 million parameters, 38 MB: small enough for a test, large enough that a save can be hit.
SMALL = Form(
    width=256, depth=4, heads=4, length=32, batch=2, corpus_bytes=200_000, steps=30, save_every=3, threads=1,
    kills=2, kills_min=2, aimed=2, torn=1, kills_max=8, free_bytes=400_000_000,
)
