"""Where checkpoints live: names, bytes, syncs and renames. Knows no torch, no plan."""
