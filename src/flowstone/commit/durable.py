"""Names become durable: by a sync where the store needs one, else when its calls return."""

from __future__ import annotations

from flowstone.store.base import Store


def sync(store: Store, directory: str = "") -> None:
    """Make the names in a directory durable, where they are not yet."""
    if store.capabilities.needs_sync:
        store.sync_directory(directory)
