"""A committed checkpoint, read-only."""
