"""Makes the golden journal of steps that may lag; run once, in tests/: `python -m golden.make_lag_journal`.

That of make_journal.py with `lag_steps` 3, six steps, and what a power loss may leave of it: the payload of the fifth
is torn, and the sixth behind it is whole.
"""

from __future__ import annotations

from golden.make import GOLDEN
from golden.make_journal import main

from flowstone.commit import journals
from flowstone.store.local import LocalStore

LAG_STEPS, STEPS, TORN = 3, 6, 5
STORE = GOLDEN / "journal-1-lag"

if __name__ == "__main__":
    main(STORE, steps=STEPS, lag_steps=LAG_STEPS)
    store = LocalStore(STORE)
    (journal,) = journals.listed(store)
    (torn,) = (one for one in journals.frames(store, journal, 0) if one.step == TORN)
    with (STORE / journal.directory / "rank-00000.journal").open("r+b") as file:
        file.seek(torn.offset + torn.frame.payload_offset)
        file.write(bytes(torn.frame.frame_bytes - torn.frame.payload_offset))
