"""Studies of how a file system moves bytes. Nothing here is used by a save or a load, and nothing needs torch."""
