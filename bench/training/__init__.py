"""Training with saves: what bench/interference.py measures, and how it becomes tables."""
