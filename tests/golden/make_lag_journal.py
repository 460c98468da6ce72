"""Makes the golden journal of steps that may lag; run once, in tests/: `python -m golden.make_lag_journal`.

The journal of make_journal.py with `lag_steps` 3 and six steps, as after a power loss: the payload of the fifth step is
torn, and the sixth after it is complete.
"""

from __future__ import annotations

from flowstone.journal import journals
from flowstone.store.local import LocalStore
from golden.make import GOLDEN
from golden.make_journal import main

LAG_STEPS, STEPS, TORN = 3, 6, 5
STORE = GOLDEN / "journal-1-lag"

if __name__ == "__main__":
    main(STORE, steps=STEPS, lag_steps=LAG_STEPS)
    store = LocalStore(STORE)
    (journal,) = journals.list_journals(store)
    (torn,) = (frame for frame in journals.complete_frames(store, journal, 0) if frame.step == TORN)
    with (STORE / journal.directory / "rank-00000.journal").open("r+b") as file:
        file.seek(torn.offset + torn.frame.payload_offset)
        file.write(bytes(torn.frame.frame_bytes - torn.frame.payload_offset))
