"""Where checkpoints are stored: names, bytes, syncs and renames. Independent of torch and of plans."""
