"""Makes the golden journal of a state on a device; run once, in tests/: `python -m golden.make_device_journal`.

The journal of make_journal.py, with its parameters on the simulated device, so its fingerprints are of chunks.
"""

from __future__ import annotations

from golden.make import GOLDEN
from golden.make_journal import Training, main
from simulated_device import SimulatedDevice, visible_device

STORE = GOLDEN / "journal-3"

if __name__ == "__main__":
    with visible_device(SimulatedDevice(1 << 20)) as far:
        training = Training()
        far.take(training.model)
        training.train_step(0)  # makes the slots, and changes nothing
        far.take_slots(training.optimizer)
        main(STORE, training)
