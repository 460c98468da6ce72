"""A store on the simulated disk obeys the contract of every store, so its results hold for them."""

from pathlib import Path

from contract import StoreContract
from sim_disk import Disk

from flowstone.config import MIB, EngineOptions
from flowstone.store.local import LocalStore


class TestStoreOnSimulatedDisk(StoreContract):
    def open_store(self, root: Path) -> LocalStore:
        sandbox = root.parent.parent
        return LocalStore(root, EngineOptions(direct="off", queue_depth=4, request_bytes=2 * MIB), Disk(sandbox))
