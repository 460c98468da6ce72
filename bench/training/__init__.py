"""Training with saves: the measurements of bench/interference.py, and their tables."""
