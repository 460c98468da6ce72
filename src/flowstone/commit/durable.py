"""Make names durable: by a sync where the store needs one; elsewhere they are durable when calls return."""

from __future__ import annotations

from flowstone.store.base import Store


def sync(store: Store, directory: str = "") -> None:
    """Make the names in a directory durable, if the store needs a call for that."""
    if store.capabilities.needs_sync:
        store.sync_directory(directory)
