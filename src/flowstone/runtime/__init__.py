"""What a process does to a Checkpointer: threads, turns, signals, its end."""
