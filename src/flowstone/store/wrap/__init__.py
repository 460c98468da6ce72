"""Wrappers: stores that pass their calls on to another store, and change some of them."""

from flowstone.store.wrap.tracing import FaultInjectingStore, RetryingStore, StoreCall, TracingStore
from flowstone.store.wrap.wrapper import Wrapper

__all__ = ["FaultInjectingStore", "RetryingStore", "StoreCall", "TracingStore", "Wrapper"]
