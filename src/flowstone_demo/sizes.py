"""The sizes of the demo: one set for users, and one for the tests."""

from __future__ import annotations

import msgspec


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a training job, except for its seed.

    length   length of a training excerpt, in bytes of text
    batch    how many excerpts a step has, on all ranks together
    threads  threads of each process
    """

    width: int
    depth: int
    heads: int
    length: int
    batch: int
    corpus_bytes: int
    steps: int
    dropout: float = 0.1
    learning_rate: float = 6e-4
    warmup_steps: int = 10
    threads: int = 2


class DemoSize(Sizes, frozen=True, kw_only=True):
    """All parameters of acts one to three, and five, that are not random.

    save_every    how many steps there are from one save to the next in act two
    kills         number of planned SIGKILLs in act two; `aimed` of them wait until a save has begun
    kills_min     how many kills there must be at least
    torn          how many kills must at least interrupt a save
    kills_max     after so many kills there are no more, even if too few saves were interrupted
    free_bytes    disk space that is needed for the stores, one more save in flight, and the file of torch.save
    journal_kills number of SIGKILLs in act five, at random moments
    recovery_s    in act five, a full checkpoint is saved once a load would take longer than so many seconds
    """

    save_every: int
    kills: int
    kills_min: int
    aimed: int
    torn: int
    kills_max: int
    free_bytes: int
    journal_kills: int
    recovery_s: float
    torch_saves: int = 3


class RankDemoSize(Sizes, frozen=True, kw_only=True):
    """All parameters of act four.

    ranks       number of ranks at first, and after each kill; the batch must be divisible by each
    victim      the rank of the first job that is killed when it begins to save step `killed_saving`
    killed_at   once this step is done, all ranks of the second job are killed
    deadline_s  how many seconds ranks have to agree; after half of that without a heartbeat, a rank counts as dead
    """

    save_every: int
    ranks: tuple[int, int, int] = (4, 2, 1)
    victim: int = 2
    killed_saving: int
    killed_at: int
    deadline_s: float = 16.0


# 25.4 million parameters. On two cores, a step of 256 bytes of text took 0.33 s; the 192 bytes used here take less.
FULL = DemoSize(
    width=512, depth=8, heads=8, length=48, batch=4, corpus_bytes=4_000_000, steps=80, save_every=4,
    kills=6, kills_min=5, aimed=4, torn=2, kills_max=12, free_bytes=12_000_000_000, journal_kills=10, recovery_s=2.0,
)

# 3.2 million parameters, 38 MB: small enough for a test, and large enough for a kill to interrupt a save.
SMALL = DemoSize(
    width=256, depth=4, heads=4, length=32, batch=2, corpus_bytes=200_000, steps=30, save_every=3, threads=1,
    kills=2, kills_min=2, aimed=2, torn=1, kills_max=8, free_bytes=800_000_000, journal_kills=2, recovery_s=0.3,
)

# Without dropout, as each rank would draw masks for its own part of the batch, which differs with the number of ranks.
FULL_RANKS = RankDemoSize(
    width=256, depth=3, heads=4, length=32, batch=8, corpus_bytes=1_000_000, steps=20, save_every=4, threads=1,
    dropout=0.0, warmup_steps=4, killed_saving=8, killed_at=14,
)
SMALL_RANKS = RankDemoSize(
    width=64, depth=2, heads=2, length=16, batch=4, corpus_bytes=100_000, steps=12, save_every=2, threads=1,
    dropout=0.0, warmup_steps=2, killed_saving=4, killed_at=7,
)
