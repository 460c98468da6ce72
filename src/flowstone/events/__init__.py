"""The events that a Checkpointer passes to its `on_event`."""
