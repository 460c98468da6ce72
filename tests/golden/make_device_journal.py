"""Makes the golden journal of a state on a device; run once, in tests/: `python -m golden.make_device_journal`.

That of make_journal.py, with its parameters on the simulated device: so its fingerprints are of chunks.
"""

from __future__ import annotations

from far import Far, shown
from golden.make import GOLDEN
from golden.make_journal import Training, main

STORE = GOLDEN / "journal-3"

if __name__ == "__main__":
    with shown(Far(1 << 20)) as far:
        training = Training()
        far.take(training.model)
        training.learn(0)  # makes the slots, and changes nothing
        far.take_slots(training.optimizer)
        main(STORE, training)
