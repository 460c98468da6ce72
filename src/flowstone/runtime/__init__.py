"""How a Checkpointer lives with its process: threads, turns, signals, the end of the script."""
